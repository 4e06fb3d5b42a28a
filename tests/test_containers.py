"""Container files are consistent with each other and with the command line; `make lint-containers` lints them."""

from __future__ import annotations

import importlib
import json
import re
import socket
import subprocess
from pathlib import Path
from typing import Any

from hansa.cli.app import app  # isort: skip  (before typer: it silences what typer's import warns of)
import pytest
import typer.main
import yaml

from hansa.config import load as load_config
from hansa.federation.policy import Policy

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "containers"
DOCKERFILE = FOLDER / "Dockerfile"
SITES = ("north", "east", "south")


def load(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


def resources(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / "kubernetes" / name).read_text(encoding="utf-8")))


def resource(name: str, kind: str) -> dict[str, Any]:
    (found,) = [one for one in resources(name) if one["kind"] == kind]
    return found


def pods(name: str) -> list[dict[str, Any]]:
    """Return the pods of the Deployment or the RayJob of a manifest."""
    if name == "site.yaml":
        return [resource(name, "Deployment")["spec"]["template"]["spec"]]
    job = resource(name, "RayJob")["spec"]
    cluster = job["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [job["submitterPodTemplate"]["spec"], *(group["template"]["spec"] for group in groups)]


def parse_command(arguments: list[str]) -> dict[str, Any]:
    """Return the parameters of a command line, as Hansa's own command line parses it."""
    name, *rest = arguments
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    return dict(command.make_context(name, list(rest), resilient_parsing=False).params)


def stages() -> dict[str, list[tuple[str, str]]]:
    """Return the instructions of each stage, by its name."""
    found: dict[str, list[tuple[str, str]]] = {}
    lines = [line for line in DOCKERFILE.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        name, _, value = line.partition(" ")
        if name == "FROM":
            found[value.split(" AS ")[1]] = []
        elif found and name:
            list(found.values())[-1].append((name, value))
    return found


def test_the_default_image_is_the_last_stage_without_root_and_compiler() -> None:
    found = stages()
    assert list(found)[-1] == "hansa"
    for image in ("hansa", "ray"):
        assert [value for name, value in found[image] if name == "USER"][-1] == "10001:10001"
    for image in ("runtime", "hansa", "ray"):
        assert not [value for name, value in found[image] if name == "RUN" and re.search(r"\b(gcc|build)\b", value)]
    assert ("ENTRYPOINT", '["hansa"]') in found["runtime"]
    assert re.search("^torch==", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)


def test_what_the_dockerfile_copies_exists_and_is_in_the_build_context() -> None:
    ignore = (FOLDER / "Dockerfile.dockerignore").read_text(encoding="utf-8").split()
    for lines in stages().values():
        for value in (value for name, value in lines if name == "COPY"):
            if stage := re.search(r"--from=(\S+)", value):
                assert stage[1] in stages()
                continue
            for source in value.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert f"!{source}" in ignore, source


def test_services_are_a_server_its_keys_and_the_confined_sites_of_the_example() -> None:
    compose = load("compose.yaml")
    services = compose["services"]
    assert set(services) == {"keys", "server", *SITES}
    for name in ("fedcams.yaml", "cafga.yaml"):
        config = yaml.safe_load((ROOT / "examples" / "federation" / name).read_text(encoding="utf-8"))
        assert tuple(config["engine"]["sites"]) == SITES
    used = set()
    for name, service in services.items():
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"]), name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "ports" not in service, name
        assert ("user" in service) == (name == "keys"), f"{name}: the image's user is not root"
        for mount in service["volumes"]:
            if mount["type"] == "volume":
                used.add(mount["source"])
            else:
                assert (FOLDER / mount["source"]).is_dir()
                assert mount["read_only"] is True
        keys = [mount for mount in service["volumes"] if mount["source"].startswith("keys-")]
        own = [{"type": "volume", "source": f"keys-{name}", "target": "/keys", "read_only": True}]
        assert name == "keys" or keys == own  # of others it sees none, and its own it cannot change
    assert used == set(compose["volumes"])


def test_commands_of_the_services_are_commands_of_hansa() -> None:
    services = load("compose.yaml")["services"]
    serve = parse_command(services["server"]["command"])
    assert [Path(path).name for path in serve["configs"]] == ["fedcams.yaml", "cafga.yaml"]
    for path in serve["configs"]:
        assert (ROOT / "examples" / "federation" / Path(path).name).is_file()
    for site in SITES:
        join = parse_command(services[site]["command"])
        assert join["site"] == site
        assert join["address"] == f"server:{serve['port']}"
        assert str(join["keys"]) == str(serve["keys"]) == "/keys"
        assert (ROOT / "examples" / "federation" / Path(join["policy"]).name).is_file()


def test_keys_are_made_for_all_sites_and_for_the_names_by_which_the_server_is_reached() -> None:
    (script,) = load("compose.yaml")["services"]["keys"]["command"]
    line = next(line for line in script.splitlines() if line.startswith("hansa keys "))
    keys = parse_command(line.split()[1:])
    assert keys["sites"] == ",".join(SITES)
    assert keys["hosts"].split(",") == ["server", "localhost", "127.0.0.1"]  # the server connects to its own SuperLink
    done = subprocess.run(["sh", "-n"], input=script.replace("$$", "$"), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_server_is_healthy_while_its_port_accepts_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    healthcheck = importlib.import_module("healthcheck")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        assert healthcheck.main([port]) == 0
    assert healthcheck.main([port]) == 1


@pytest.mark.parametrize("name", ["site.yaml", "rayjob.yaml"])
def test_resources_follow_the_schemas_of_kubernetes(name: str) -> None:
    """Also the pods inside a RayJob, whose own schema kubernetes-validate does not have."""
    validate = pytest.importorskip("kubernetes_validate", reason="make lint-containers installs it")
    wrapped = [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": pod} for pod in pods(name)]
    for one in [*wrapped, *(one for one in resources(name) if not one["apiVersion"].startswith("ray.io/"))]:
        validate.validate(one, validate.latest_version(), strict=True)


@pytest.mark.parametrize("name", ["site.yaml", "rayjob.yaml"])
def test_pods_are_confined_and_what_they_mount_is_in_the_file(name: str) -> None:
    present = {(one["kind"], one["metadata"]["name"]) for one in resources(name)}
    assert "Secret" not in {kind for kind, _ in present}
    for pod in pods(name):
        context = pod["securityContext"]
        assert (context["runAsNonRoot"], context["runAsUser"]) == (True, 10001)
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            security = container["securityContext"]
            assert (security["allowPrivilegeEscalation"], security["readOnlyRootFilesystem"]) == (False, True)
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert set(container["resources"]) == {"requests", "limits"}
            assert "/tmp" in [mount["mountPath"] for mount in container["volumeMounts"]]
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
        for volume in pod["volumes"]:
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in present
            if "persistentVolumeClaim" in volume:
                assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in present
            assert "secret" not in volume or volume["secret"]["defaultMode"] == 0o440


def test_the_site_runs_a_command_of_hansa_on_files_that_hansa_reads(tmp_path: Path) -> None:
    (container,) = pods("site.yaml")[0]["containers"]
    join = parse_command(container["args"])
    assert join["address"] == "fl.example.org:8443"
    files = resource("site.yaml", "ConfigMap")["data"]
    assert set(files) == {Path(join["policy"]).name, "data.yaml"}
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert Policy.load(tmp_path / "policy.yaml").rounds == 100
    assert load_config(tmp_path / "data.yaml").data.name == "csv-folder"


def test_the_ray_job_runs_a_command_of_hansa_on_its_configuration(tmp_path: Path) -> None:
    spec = resource("rayjob.yaml", "RayJob")["spec"]
    program, *arguments = spec["entrypoint"].split()
    assert program == "hansa"
    assert parse_command(arguments)
    (tmp_path / "config.yaml").write_text(resource("rayjob.yaml", "ConfigMap")["data"]["config.yaml"], encoding="utf-8")
    assert load_config(tmp_path / "config.yaml").rounds == 40


def test_images_of_the_manifests_have_the_version_of_the_newest_release() -> None:
    release = re.search(r"^## (\d+\.\d+\.\d+) ", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert release
    text = json.dumps([resources(name) for name in ("site.yaml", "rayjob.yaml")])
    assert set(re.findall(r'"registry\.example/[\w-]+:([^"]+)"', text)) == {release[1]}
