from __future__ import annotations

import json
import logging
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from hansa.core.errors import HansaError
from hansa.core.keys import Key
from hansa.core.types import State
from hansa.runs import checkpoint
from hansa.runs.store import DamagedFileError, DiskStore, RamStore, io
from torture.disks import Counting, Hasty


@pytest.fixture(autouse=True)
def _hasty() -> Any:
    with io.use_disk(Hasty()):
        yield


def vector(*path: int | str, size: int = 50) -> torch.Tensor:
    return torch.from_numpy(Key(9).child(*path).numpy().normal(size=size))


def same(left: Any, right: Any) -> bool:
    """Equal in type, structure, dtype and every bit."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        bits = [x.contiguous().reshape(-1).view(torch.uint8) for x in (left, right)]
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(*bits)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right) or (isinstance(left, float) and math.isnan(left) and math.isnan(right))


def tree() -> State:
    x = vector("x")
    return {
        "round": 12,
        "server": {"model": {"m": x, "v": x.square().float(), "t": torch.tensor(3), "on": torch.tensor([True, False])}},
        "aggregate": {"model": {}, "control": [vector("a"), [vector("b").bfloat16()], {"c": torch.empty(0, 3)}]},
        "shared": {"whole": x, "part": x[5:9], "again": x, "turned": x.reshape(5, 10).T},
        "dotted": {"a": {"b": vector("one")}, "a.b": vector("two")},
        "odd": torch.tensor([float("nan"), float("-inf"), -0.0, 1e-310], dtype=torch.float64),
        "plain": [1, -(2**70), 0.1, float("nan"), float("inf"), -0.0, 5e-324, True, None, "π / $", "", [], {}],
        "slash/name": "kept",
    }


def test_a_tree_comes_back_with_every_bit_and_type(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, tree(), {"round": 12})
    state, _ = checkpoint.load(tmp_path)
    assert same(state, tree())
    state["server"]["model"]["m"].add_(1)  # what was loaded is its own


def test_tensors_that_shared_memory_are_saved_each_for_itself(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, tree(), {})
    state, _ = checkpoint.load(tmp_path)
    state["shared"]["whole"].zero_()
    assert torch.equal(state["shared"]["part"], vector("x")[5:9])
    assert torch.equal(state["shared"]["again"], vector("x"))


def test_facts_come_back_with_the_versions_that_wrote_them(tmp_path: Path) -> None:
    facts = {"round": 7, "seed": 3, "config": "c0ffee", "store": 7, "loss": float("nan"), "position": {"metrics": 1234}}
    checkpoint.save(tmp_path, {}, facts)
    _, meta = checkpoint.load(tmp_path)
    versions = meta.pop("versions")
    assert same(meta, facts)
    assert versions["torch"] == torch.__version__
    assert versions.keys() == {"hansa", "torch", "python"}


def test_files_are_safetensors_and_json_and_nothing_else(tmp_path: Path) -> None:
    where = checkpoint.save(tmp_path, {"x": vector("x"), "round": 1}, {})
    assert sorted(path.name for path in where.iterdir()) == ["manifest.json", "state.json", "tensors.safetensors"]
    (tensor,) = safetensors.torch.load_file(where / "tensors.safetensors").values()
    assert torch.equal(tensor, vector("x"))
    assert json.loads((where / "state.json").read_bytes())["round"] == 1
    seal, body = (where / "manifest.json").read_bytes().split(b"\n", 1)
    assert seal.decode() == io.sha256(body)
    files = json.loads(body)["files"]
    assert {name: facts["sha256"] for name, facts in files.items()} == {
        name: io.sha256((where / name).read_bytes()) for name in ("state.json", "tensors.safetensors")
    }


def test_the_manifest_is_written_last_and_the_folder_renamed_after_it(tmp_path: Path) -> None:
    class Watching(Counting):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def open(self, path: Path, fresh: bool = False) -> int:
            self.seen.append(path.name)
            return super().open(path, fresh)

        def rename(self, source: Path, target: Path) -> None:
            self.seen.append(f"-> {target.name}")
            super().rename(source, target)

    disk = Watching()
    with io.use_disk(disk):
        checkpoint.save(tmp_path, tree(), {})
    assert disk.seen == ["state.json", "tensors.safetensors", "manifest.json", "-> 00000001"]
    assert disk.calls[-3:] == ["sync_folder", "rename", "sync_folder"]


def test_three_generations_are_kept_or_as_many_as_asked(tmp_path: Path) -> None:
    for round in range(1, 6):
        checkpoint.save(tmp_path, {"round": round}, {"round": round})
    assert [meta["round"] for meta in checkpoint.list_metadata(tmp_path)] == [3, 4, 5]
    assert checkpoint.load(tmp_path).state == {"round": 5}
    checkpoint.save(tmp_path, {"round": 6}, {"round": 6}, keep=1)
    assert [meta["round"] for meta in checkpoint.list_metadata(tmp_path)] == [6]
    with pytest.raises(HansaError, match="keep=0"):
        checkpoint.save(tmp_path, {}, {}, keep=0)


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "tensors.safetensors"])
def test_a_damaged_generation_is_named_and_left_only_when_asked(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    for round in (1, 2):
        checkpoint.save(tmp_path, {"x": vector(round)}, {"round": round})
    path = tmp_path / "00000002" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    with pytest.raises(DamagedFileError, match=rf"00000002/{name} is damaged"):
        checkpoint.load(tmp_path)
    with caplog.at_level(logging.WARNING, "hansa"):
        state, meta = checkpoint.load(tmp_path, fallback=True)
    assert meta["round"] == 1
    assert torch.equal(state["x"], vector(1))
    assert f"00000002/{name} is damaged" in caplog.text
    assert "Falling back" in caplog.text


def test_when_none_is_whole_there_is_no_state_at_all(tmp_path: Path) -> None:
    for round in (1, 2):
        (checkpoint.save(tmp_path, {}, {"round": round}) / "state.json").unlink()
    with pytest.raises(DamagedFileError, match="all 2 checkpoints are damaged"):
        checkpoint.load(tmp_path, fallback=True)


def test_a_generation_put_in_the_place_of_another_is_noticed(tmp_path: Path) -> None:
    for round in (1, 2):
        checkpoint.save(tmp_path, {}, {"round": round})
    shutil.rmtree(tmp_path / "00000002")
    shutil.copytree(tmp_path / "00000001", tmp_path / "00000002")
    with pytest.raises(DamagedFileError, match="describes generation 1"):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize("folder", ["", "nowhere"])
def test_no_checkpoint_is_said_plainly(tmp_path: Path, folder: str) -> None:
    with pytest.raises(HansaError, match="no checkpoint"):
        checkpoint.load(tmp_path / folder)
    assert checkpoint.list_metadata(tmp_path / folder) == []


def written_by(folder: Path, format: int) -> None:
    """A checkpoint that claims another format."""
    where = checkpoint.save(folder, {"rows": [1, 2]}, {"round": 1})
    manifest = io.read_sealed(where / "manifest.json")
    manifest["meta"]["versions"]["hansa"] = "7.8.9"
    io.write_sealed(where / "manifest.json", {**manifest, "format": format})


@pytest.mark.parametrize("format", [checkpoint.FORMAT + 1, checkpoint.FORMAT - 1])
@pytest.mark.parametrize("fallback", [False, True])
def test_another_format_is_refused_with_the_version_to_use(tmp_path: Path, format: int, fallback: bool) -> None:
    checkpoint.save(tmp_path, {}, {"round": 0})
    written_by(tmp_path, format)
    with pytest.raises(HansaError, match=rf"format {format}, written by Hansa 7\.8\.9.*Resume with Hansa 7\.8\.9"):
        checkpoint.load(tmp_path, fallback=fallback)


def test_an_older_format_with_a_known_way_is_migrated_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def migrate(state: State, meta: checkpoint.Meta) -> tuple[State, checkpoint.Meta]:
        return {"columns": state["rows"]}, {**meta, "moved": True}

    written_by(tmp_path, checkpoint.FORMAT - 1)
    monkeypatch.setitem(checkpoint.MIGRATIONS, checkpoint.FORMAT - 1, migrate)
    with caplog.at_level(logging.INFO, "hansa"):
        state, meta = checkpoint.load(tmp_path)
    assert state == {"columns": [1, 2]}
    assert meta["moved"]
    assert f"migrating from checkpoint format {checkpoint.FORMAT - 1}" in caplog.text


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"server": {"m": (1, 2)}}, r"state\.server\.m='tuple'"),
        ({"list": [0, {"deep": object()}]}, r"state\.list\[1\]\.deep='object'"),
        ({"rows": {3: 1}}, r"state\.rows=3"),
        ({"rows": {"$tensor": 1}}, r"state\.rows='\$tensor'"),
        ({"raw": b"bytes"}, r"state\.raw='bytes'"),
    ],
)
def test_what_cannot_be_kept_exactly_is_refused_by_its_place(tmp_path: Path, state: Any, words: str) -> None:
    with pytest.raises(HansaError, match=words):
        checkpoint.save(tmp_path, state, {})
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(HansaError, match="Tensors belong in the state"):
        checkpoint.save(tmp_path, {}, {"x": vector("x")})


def test_a_store_in_memory_is_saved_with_the_state(tmp_path: Path) -> None:
    store = RamStore()
    store.commit(0, {3: {"uplink/model/residual": vector("r")}})
    checkpoint.save(tmp_path, {"store": store.tree()}, {})
    assert RamStore.restore(checkpoint.load(tmp_path).state["store"]).digest() == store.digest()


def test_a_run_resumed_from_any_kept_checkpoint_finds_its_store_as_it_was(tmp_path: Path) -> None:
    """Checkpoints every four rounds; the store goes on between them, and goes back with them."""
    digests = {}
    with DiskStore(tmp_path / "store") as store:
        for round in range(19):
            store.commit(round, {round % 5: {"c": vector("c", round)}, (3 * round) % 7: {"e": vector("e", round)}})
            digests[store.generation] = store.digest()
            if store.generation % 4 == 0:
                checkpoint.save(tmp_path / "saved", {}, {"store": store.generation})
                store.retain([meta["store"] for meta in checkpoint.list_metadata(tmp_path / "saved")])
    assert [meta["store"] for meta in checkpoint.list_metadata(tmp_path / "saved")] == [8, 12, 16]
    for newest in (16, 12, 8):
        meta = checkpoint.load(tmp_path / "saved").meta
        assert meta["store"] == newest
        with DiskStore.open(tmp_path / "store", at_round=newest) as store:
            assert store.digest() == digests[newest]
            store.verify()
        shutil.rmtree(sorted((tmp_path / "saved").iterdir())[-1])
