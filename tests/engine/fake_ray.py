"""As much of Ray's interface as the engine uses, in this process and in turn; actors die when they are told to."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache, partial
from types import SimpleNamespace
from typing import Any


class RayError(Exception):
    """What Ray raises for an actor that is gone."""


class ActorDiedError(RayError):
    """What Ray raises at every call of an actor that could not be created."""

    actor_init_failed = True


class _Errors:
    RayError = RayError


class Ref:
    """A value in the object store, made when it is first asked for; ``never`` if it does not come."""

    def __init__(self, made: Callable[[], Any], *, never: bool = False) -> None:
        self.get, self.never = cache(made), never


class FakeRay:
    """``deaths`` says of each call of an actor, in their order, whether the actor dies at it; ``room`` how many actors
    there is room for, the others never come to work."""

    exceptions = _Errors

    def __init__(self, deaths: Sequence[bool] = (), room: int = 100, cpus: int = 2, gpus: int = 0) -> None:
        self.deaths, self.room, self.cpus, self.gpus = iter(deaths), room, cpus, gpus
        self.reserved: dict[str, Any] = {}
        self.puts, self.spawned, self.killed, self.ended = 0, 0, 0, False

    def is_initialized(self) -> bool:
        return True

    def init(self, **words: Any) -> None: ...

    def shutdown(self) -> None:
        self.ended = True

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": float(self.cpus), **({"GPU": float(self.gpus)} if self.gpus else {})}

    available_resources = cluster_resources

    def put(self, value: Any) -> Ref:
        self.puts += 1
        kept = _frozen(value)
        return Ref(lambda: kept)

    def get(self, ref: Any) -> Any:
        return [self.get(one) for one in ref] if isinstance(ref, list) else ref.get()

    def wait(self, refs: Sequence[Any], num_returns: int, timeout: float | None) -> tuple[list[Any], list[Any]]:
        """The last that was asked for comes first: order of completion means nothing."""
        able = [ref for ref in refs if not ref.never]
        return (able[-1:], []) if able else ([], list(refs))

    def kill(self, handle: Any) -> None:
        self.killed += 1

    def remote(self, **words: Any) -> Callable[[type], Any]:
        self.reserved = words
        return lambda kind: SimpleNamespace(remote=partial(self._spawn, kind))

    def _spawn(self, kind: type, *args: Any) -> _Handle:
        self.spawned += 1
        return _Handle(self, kind, args, never=self.spawned > self.room)


class _Handle:
    def __init__(self, ray: FakeRay, kind: type, args: Any, *, never: bool) -> None:
        self._ray, self._kind, self._args, self._never = ray, kind, args, never
        self._living: Any = None
        self._dead = False

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=partial(self._call, name))

    def _call(self, name: str, *args: Any) -> Ref:
        sent = [_frozen(arg) for arg in args]  # as they are now

        def made() -> Any:
            if self._dead or (name == "execute" and next(self._ray.deaths, False)):
                self._dead = True
                raise RayError("the actor died")
            if self._living is None:
                try:
                    self._living = self._kind(*(_looked_up(arg) for arg in self._args))
                except Exception as error:
                    cause = "The actor died because of an error raised in its creation task"
                    raise ActorDiedError(
                        f"{cause}, ray::init()\n  File ...\n{type(error).__name__}: {error}"
                    ) from error
            return _frozen(getattr(self._living, name)(*(_looked_up(arg) for arg in sent)))

        return Ref(made, never=self._never)


def _looked_up(value: Any) -> Any:
    return value.get() if isinstance(value, Ref) else value


def _frozen(value: Any) -> Any:
    """A copy whose arrays are read-only, as what lies in an object store is."""
    if isinstance(value, Ref):
        return value
    copied = copy.deepcopy(value)
    for array in copied if isinstance(copied, tuple) else (copied,):
        if hasattr(array, "setflags"):
            array.setflags(write=False)
    return copied
