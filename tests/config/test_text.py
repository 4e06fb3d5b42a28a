"""YAML with lines: numbers, twins, damage, overrides."""

from __future__ import annotations

import pytest
import yaml

from hansa.config.text import ConfigError, dump, parse, read


@pytest.mark.parametrize(
    ("written", "number"), [("1e-3", 1e-3), ("1E5", 1e5), ("-2e3", -2e3), (".5", 0.5), ("1.", 1.0), ("3", 3)]
)
def test_numbers_are_read_as_people_write_them(written, number):
    found = parse(f"a: {written}").data["a"]
    assert found == number
    assert type(found) is type(number)


@pytest.mark.parametrize("word", ["1e", "e5", "1-3", "12:30:00x", "1.2.3"])
def test_words_that_only_look_like_numbers_stay_words(word):
    assert parse(f"a: {word}").data["a"] == word


def test_every_key_knows_its_line():
    text = "seed: 1\nlocal:\n  lr: 0.1\n  steps: [1,\n    2]\n"
    assert parse(text, "run.yaml").problem(("local", "lr"), "x").where == "run.yaml:3"
    assert parse(text, "run.yaml").problem(("local", "steps", 1), "x").where == "run.yaml:5"


def test_a_key_that_is_not_in_the_file_is_placed_at_the_section_it_belongs_to():
    assert parse("seed: 1\nlocal:\n  lr: 0.1\n", "run.yaml").problem(("local", "clip"), "x").where == "run.yaml:2"


def test_two_equal_keys_are_refused_with_both_lines():
    with pytest.raises(ConfigError, match=r"run.yaml:3: local.lr: stands twice, first in line 2"):
        parse("local:\n  lr: 0.1\n  lr: 0.2\n", "run.yaml")


def test_text_that_is_not_yaml_names_the_line():
    with pytest.raises(ConfigError, match=r"run.yaml:3: not YAML"):
        parse("a: 1\nb: [1, 2\nc: 3\n", "run.yaml")


@pytest.mark.parametrize("text", ["- 1\n- 2", "just words", "3"])
def test_anything_but_sections_is_refused(text):
    with pytest.raises(ConfigError, match="expected sections"):
        parse(text)


def test_python_objects_are_never_made():
    with pytest.raises(ConfigError, match="not YAML"):
        parse("a: !!python/object/apply:os.system ['true']")


def test_an_alias_repeats_what_it_names_and_one_that_contains_itself_is_refused():
    assert parse("a: &x {b: 1}\nc: *x\n").data["c"] == {"b": 1}
    with pytest.raises(ConfigError, match=r"run.yaml:2: an alias that contains itself"):
        parse("seed: 1\ndata: &x {options: *x}", "run.yaml")


def test_a_missing_file_and_a_binary_one_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none.yaml: no such file"):
        read(tmp_path / "none.yaml")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"b.yaml: cannot be read"):
        read(tmp_path / "b.yaml")


def test_a_change_is_a_dotted_key_and_a_yaml_value():
    document = parse("local: {lr: 0.1}")
    for change in ("local.lr=1e-2", "local.steps=[1, 2]", "sample={participation: 0.1}", "name=a=b"):
        document.change(change)
    assert document.data == {
        "local": {"lr": 0.01, "steps": [1, 2]}, "sample": {"participation": 0.1}, "name": "a=b"
    }  # fmt: skip


def test_a_change_below_a_bare_word_expands_it():
    document = parse("algorithm: fedprox\ndata: synthetic\nuplink: direct\n")
    document.change("algorithm.mu=0.1")
    document.change("data.clients=5")
    document.change("uplink.kind=memoryless")
    assert document.data["algorithm"] == {"preset": "fedprox", "mu": 0.1}
    assert document.data["data"] == {"name": "synthetic", "clients": 5}
    assert document.data["uplink"] == {"kind": "memoryless"}


@pytest.mark.parametrize("change", ["local.lr", "=3", ".lr=3", "local..lr=3"])
def test_a_change_without_key_or_value_is_refused(change):
    with pytest.raises(ConfigError, match="expected KEY=VALUE"):
        parse("").change(change)


def test_a_change_beyond_the_end_of_a_list_is_refused():
    with pytest.raises(ConfigError, match="no entry 5 in this list of 2"):
        parse("local: {steps: [1, 2]}").change("local.steps.5=3")


def test_what_is_dumped_reads_back_the_same():
    data = {"seed": 0, "name": "a: b", "local": {"lr": 1e-5, "steps": list(range(60))}, "sample": {"kind": "uniform"}}
    assert parse(dump(data)).data == data
    assert yaml.safe_load(dump({"a": {"b": [1, None, True]}})) == {"a": {"b": [1, None, True]}}
