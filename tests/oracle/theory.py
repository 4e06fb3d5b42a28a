"""The theorems of the four papers as plain functions of numbers, typed from the papers' texts. Imports no hansa."""

from __future__ import annotations

from math import inf, sqrt


def cams_full(K, m, T, eta, eta_l, b1, b2, eps, L, G, sl, sg, gap, d):
    """[CAMS] Theorem 4.4: the limit of eta_l, Psi, Phi and the bound (4.1)."""
    c1 = b1 / (1 - b1)
    bracket = (3 + c1 * c1) * eta * L + 2 * sqrt(2 * (1 - b2)) * G
    limit = min(1 / (8 * K * L), eps / (K * sqrt(b2 * K * K * G * G + eps) * bracket))
    psi = c1 * G * G * d / sqrt(eps) + 2 * c1 * c1 * eta * eta_l * K * L * G * G * d / eps
    phi = 5 * eta_l**2 * K * L * L / sqrt(2 * eps) * (sl**2 + 6 * K * sg**2) + bracket * eta_l / (2 * m * eps) * sl**2
    bound = 4 * sqrt(b2 * eta_l**2 * K**2 * G**2 + eps) * (gap / (eta * eta_l * K * T) + psi / T + phi)
    return limit, psi, phi, bound


def cams_partial(K, m, n, T, eta, eta_l, b1, b2, eps, L, G, sl, sg, gap, d):
    """[CAMS] Theorem 4.9, with eta_l^2 in Phi as in (A.32)."""
    c1 = b1 / (1 - b1)
    bracket = 3 * eta * L + c1**2 * eta * L + 2 * sqrt(2 * (1 - b2)) * G
    second = inf if n == 1 else n * (m - 1) * eps / (24 * m * (n - 1) * K * sqrt(b2 * K**2 * G**2 + eps) * bracket)
    psi = c1 * G * G * d / sqrt(eps) + 2 * c1 * c1 * eta * eta_l * K * L * G * G * d / eps
    phi = 5 * eta_l**2 * K * L**2 / sqrt(2 * eps) * (sl**2 + 6 * K * sg**2)
    phi += bracket * eta_l / (2 * n * eps) * sl**2
    phi += (
        bracket
        * eta_l
        * (m - n)
        / (2 * n * (m - 1) * eps)
        * (15 * K**2 * L**2 * eta_l**2 * (sl**2 + 6 * K * sg**2) + 3 * K * sg**2)
    )
    bound = 8 * sqrt(b2 * eta_l**2 * K**2 * G**2 + eps) * (gap / (eta * eta_l * K * T) + psi / T + phi)
    return min(1 / (8 * K * L), second), psi, phi, bound


def cams_compressed(K, m, T, eta, eta_l, b1, b2, eps, L, G, sl, sg, gap, d, q, gamma):
    """[CAMS] Theorem 4.18: the bound (4.5)."""
    c1 = b1 / (1 - b1) + 2 * q / (1 - q**2)
    c2 = b1**2 / (1 - b1) ** 2 + 4 * (q + gamma) ** 2 / (1 - q**2) ** 2
    root = sqrt(4 * b2 * (1 + q**2) ** 3 * (1 - q**2) ** -2 * K**2 * G**2 + eps)
    bracket = 3 * eta * L + 2 * c2 * eta * L + 2 * sqrt(2 * (1 - b2)) * G
    limit = min(1 / (8 * K * L), eps / (K * root * bracket))
    psi = c1 * G**2 * d / sqrt(eps) + 2 * c1**2 * eta * eta_l * K * L * G**2 * d / eps
    phi = 5 * eta_l**2 * K * L**2 / sqrt(2 * eps) * (sl**2 + 6 * K * sg**2) + bracket * eta_l / (2 * m * eps) * sl**2
    factor = 4 * sqrt(b2 * 4 * (1 + q**2) ** 3 / (1 - q**2) ** 2 * eta_l**2 * K**2 * G**2 + eps)
    return limit, psi, phi, factor * (gap / (eta * eta_l * K * T) + psi / T + phi)


def cams_compressed_partial(K, m, n, T, eta, eta_l, b1, b2, eps, L, G, sl, sg, gap, d, q):
    """[CAMS] Theorem B.2: the bound (B.23)."""
    c1 = b1 / (1 - b1) + 2 * q / (1 - q**2)
    root = sqrt(4 * b2 * (1 + q**2) ** 3 * (1 - q**2) ** -2 * K**2 * G**2 + eps)
    bracket = eta * L + sqrt(2 * (1 - b2)) * G
    second = inf if n == 1 else n * (m - 1) * eps / (48 * m * (n - 1)) / (K * root * bracket)
    psi = c1 * G**2 * d / sqrt(eps) + 2 * c1**2 * eta * eta_l * K * L * G**2 * d / eps
    phi = c1 * eta * eta_l * K * L * G**2 / eps
    phi += 5 * eta_l**2 * K * L**2 / sqrt(2 * eps) * (sl**2 + 6 * K * sg**2)
    phi += bracket * eta_l / (n * eps) * sl**2
    phi += (
        bracket
        * eta_l
        * (m - n)
        / (n * (m - 1) * eps)
        * (15 * K**2 * L**2 * eta_l**2 * (sl**2 + 6 * K * sg**2) + 3 * K * sg**2)
    )
    factor = 8 * sqrt(4 * b2 * (1 + q**2) ** 3 / (1 - q**2) ** 2 * eta_l**2 * K**2 * G**2 + eps)
    return min(1 / (8 * K * L), second), psi, phi, factor * (gap / (eta * eta_l * K * T) + psi / T + phi)


def hafed(K, n, m, rho, tau, T, eta, eta_l, b1, b2, eps, L, G, s, within, between, gap, d):
    """[HAFED] Theorems 5.6 (m = n) and 5.8 with C = C~ = alpha = 1: limits at this eta_l, Psi, Phi_1..4, bound."""
    D = tau if rho == 1 else min(1 / (1 - rho), tau)
    c = b1 / (1 - b1)
    cbe = (c**2 + 3) * eta * L + 2 * sqrt(1 - b2) * G
    c0 = sqrt(b2 * eta_l**2 * tau**2 * G**2 + eps)
    psi = c * G**2 * d / sqrt(eps) + 2 * c**2 * eta * eta_l * tau * L * G**2 * d / eps
    phi1 = (
        L**2 * eta_l**2 / (4 * sqrt(eps))
        * (tau**2 * between**2 + tau * rho**2 * D * within**2 + tau * s**2 * (1 / n + rho**2))
    )  # fmt: skip
    if m == n:
        limits = [eps**0.25 / sqrt(c0 * tau * (tau + rho**2 * D)), eps / (2 * tau * c0 * cbe)]
        phi2, phi3, phi4 = cbe * eta_l / (2 * eps * K * n) * s**2, 0.0, 0.0
    else:
        limits = [
            inf if tau == 1 else 1 / (4 * c0 * cbe * (tau - 1)),
            eps**0.25 / (2 * L * sqrt(c0 * tau * (tau + rho**2 * D))),
            inf if rho == 0 else 1 / (128 * c0 * cbe * rho**2 * D) / ((n - m) / (m * (n - 1)) + 1 / tau**2),
        ]
        phi2 = cbe * (1 + (n - m) / m * rho**2) * eta_l / (eps * K * n) * s**2
        tail = D * rho**2 * (between**2 + within**2 + s**2 + D * s**2 / (tau**2 * n))
        phi3 = cbe * (n - m) / (m * (n - 1)) * eta_l * tail
        phi4 = cbe * eta_l**3 * L**2 * tail
    bound = 8 * c0 * (gap / (eta * eta_l * tau * T) + psi / T + phi1 + phi2 + phi3 + phi4)
    return limits, psi, (phi1, phi2, phi3, phi4), bound


def afga(K, m, rho, I, R, L, G, s, within, between, gap):  # noqa: E741
    """[AFGA] Theorem D.3; with K = 1 and between = 0 Theorem 4.6, up to constants."""
    leading = (gap + L * (s**2 + within**2 + between**2 + s**2 / K)) / sqrt(R * I * m)
    second = (G**2 + L**2 * (between**2 + (1 + rho**2) * within**2) + rho**2 * s**2 / I) / R
    return leading, second


def aware(K, lam, found, eta_l, alpha, p, L, sl, sg, zeta, norm, scale, D):
    """[AWARE] Corollary 3.2, Lemma 4.1, rho^t and (9) without vanishing terms, and the factors of Theorem 4.2."""
    low = min(K)
    hetero = sum(30 * eta_l * (k - low) * z for k, z in zip(K, zeta, strict=True))
    mean_steps = sum(w * k for w, k in zip(lam, K, strict=True))
    drift = 5 * eta_l * (sl**2 + 6 * low**2 * sg**2 + 6 * mean_steps * norm**2) + hetero
    beta = (1 - alpha) * p
    gap = sum((f - w) ** 2 / w**2 for f, w in zip(found, lam, strict=True))
    chi2 = sum((f / w) ** 2 for f, w in zip(found, lam, strict=True))
    rho = 1 - sqrt(gap) - gap - 6 * mean_steps * beta * L * scale * sqrt(chi2) / D
    sigma2 = 5 * eta_l * (sl**2 + 6 * low**2 * sg**2)
    stationary = beta * L * scale * sqrt(chi2) / (rho * D) * sqrt(sigma2 + hetero)
    return hetero, drift, beta**2 * L**2 * drift, rho, stationary, (2 * gap, 2 * (1 + gap))
