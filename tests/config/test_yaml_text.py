"""YAML with lines: numbers, twins, damage, overrides."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest

from hansa.config import from_yaml
from hansa.config.yaml_text import ConfigError, parse_document, read_document


@pytest.mark.parametrize(
    ("written", "number"), [("1e-3", 1e-3), ("1E5", 1e5), ("-2e3", -2e3), (".5", 0.5), ("1.", 1.0), ("3", 3),
     *((word, word) for word in ("1e", "e5", "1-3", "12:30:00x", "1.2.3", "2026-01-31", "2026-99-99"))],
)  # fmt: skip
def test_numbers_are_read_as_people_write_them(written, number):
    found = parse_document(f"a: {written}").data["a"]
    assert found == number
    assert type(found) is type(number)


def test_one_text_from_two_places_names_the_place():
    """Texts are parsed once, wherever they come from; what one reader changes another does not see."""
    text = "seed: 1\nlocal: {lr: 0.1}\n"
    one, other = parse_document(text, "one.yaml"), parse_document(text, "other.yaml")
    one.apply("local.lr=0.5")
    assert (one.data["local"], other.data["local"]) == ({"lr": 0.5}, {"lr": 0.1})
    assert [each.problem(("seed",), "x").where for each in (one, other)] == ["one.yaml:1", "other.yaml:1"]
    for name in ("one.yaml", "other.yaml"):
        with pytest.raises(ConfigError, match=rf"^{name}:2: seed: is set twice"):
            parse_document("seed: 1\nseed: 2\n", name)


def test_every_key_knows_its_line():
    text = "seed: 1\nlocal:\n  lr: 0.1\n  steps: [1,\n    2]\n"
    assert parse_document(text, "run.yaml").problem(("local", "lr"), "x").where == "run.yaml:3"
    assert parse_document(text, "run.yaml").problem(("local", "steps", 1), "x").where == "run.yaml:5"
    assert parse_document(text, "run.yaml").problem(("local", "clip"), "x").where == "run.yaml:2"  # its section


def test_an_alias_repeats_what_it_names_and_one_that_contains_itself_is_refused():
    document = parse_document("a: &a {lr: 0.1}\n" + "".join(f"k{n}: *a\n" for n in range(1000)))
    assert document.data["k999"] == {"lr": 0.1}
    with pytest.raises(ConfigError, match=r"run.yaml:2: nested more than 40 levels"):
        parse_document("seed: 1\ndata: &x {options: *x}", "run.yaml")


def test_files_that_are_missing_binary_or_devices_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none.yaml: no such file"):
        read_document(tmp_path / "none.yaml")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"b.yaml: cannot be read"):
        read_document(tmp_path / "b.yaml")
    with pytest.raises(ConfigError, match="longer than 1048576 characters"):
        read_document("/dev/zero")  # which has no end
    with pytest.raises(ConfigError, match="cannot be read as text: embedded null"):
        read_document("a\0b")


def test_a_change_is_a_dotted_key_and_a_yaml_value():
    document = parse_document("local: {lr: 0.1}")
    for change in ("local.lr=1e-2", "local.steps=[1, 2]", "sample={participation: 0.1}", "name=a=b"):
        document.apply(change)
    assert document.data == {
        "local": {"lr": 0.01, "steps": [1, 2]}, "sample": {"participation": 0.1}, "name": "a=b"
    }  # fmt: skip


def test_a_change_below_a_bare_word_expands_it():
    document = parse_document("algorithm: fedprox\ndata: synthetic\nuplink: direct\n")
    document.apply("algorithm.mu=0.1")
    document.apply("data.clients=5")
    document.apply("uplink.kind=memoryless")
    assert document.data["algorithm"] == {"preset": "fedprox", "mu": 0.1}
    assert document.data["data"] == {"name": "synthetic", "clients": 5}
    assert document.data["uplink"] == {"kind": "memoryless"}


@pytest.mark.parametrize("change", ["local.lr", "=3", ".lr=3", "local..lr=3"])
def test_a_change_without_key_or_value_is_refused(change):
    with pytest.raises(ConfigError, match="expected KEY=VALUE"):
        parse_document("").apply(change)


def test_a_change_beyond_the_end_of_a_list_is_refused():
    with pytest.raises(ConfigError, match="no entry 5 in this list of 2"):
        parse_document("local: {steps: [1, 2]}").apply("local.steps.5=3")


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in pairwise("abcdefghi")
)


def quickly(text):
    """The problem of a text, found within a moment of the machine's time."""
    began = time.process_time()
    with pytest.raises(ConfigError) as caught:
        from_yaml(text, source="run.yaml")
    assert time.process_time() - began < 5
    assert len(str(caught.value)) < 2000
    return str(caught.value)


def test_aliases_that_stand_for_a_billion_values_are_refused_at_once():
    assert len(BOMB) < 450
    assert "run.yaml:1: expands to more than 100000 values by its aliases." in quickly(BOMB)
    merged = "a: &a {k: 1}\n" + "".join(
        f"{name}: &{name} {{<<: [{', '.join([f'*{before}'] * 9)}]}}\n" for before, name in pairwise("abcdefghi")
    )
    assert "run.yaml:2: a value of type 'tag:yaml.org,2002:merge'" in quickly(merged)
    assert quickly("--- " + "x" * (1 << 20)) == "run.yaml:1: longer than 1048576 characters."


def test_deep_nesting_is_refused():
    for text in ("a: " + "[" * 50 + "]" * 50, "a: " + "[" * 100_000, "{a: " * 5000, "- " * 3000):
        assert quickly(text) == "run.yaml:1: nested more than 40 levels deep."


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1\n- 2", "run.yaml:1: expected sections"),
        ("just words", "run.yaml:1: expected sections"),
        ("a: 1\nb: [1, 2\nc: 3\n", "run.yaml:3: not YAML"),
        ("local:\n  lr: 0.1\n  lr: 0.2\n", "run.yaml:3: local.lr: is set twice, first in line 2"),
        ("a: !!python/object/apply:os.system ['true']", "a value of type 'tag:yaml.org,2002:python/object/apply:os."),
        ("seed: 1\nname: a\0b", "run.yaml:2: not YAML: unacceptable character #x0000"),
        ('seed: 1\nname: "a\\0b"', r"run.yaml:2: a string with the control character '\x00'."),
        ('seed: 1\nname: "\\e[31m"', r"run.yaml:2: a string with the control character '\x1b'."),
        ('seed: 1\n"\\ud800": 1', r"run.yaml:2: a string with the control character '\ud800'."),
        ("seed: 1\nrounds: " + "9" * 5000, "run.yaml:2: a number of 5000 digits: expected at most 100."),
        ("seed: 1\nmax_norm: 0." + "9" * 5000, "run.yaml:2: a number of 5002 digits"),
        ("seed: !!int x", "run.yaml:1: a value that does not match its tag"),
        ("seed: !!bool maybe", "run.yaml:1: a value that does not match its tag"),
        ("a: 1\nb: !!set {x, y}", "run.yaml:2: a value of type 'tag:yaml.org,2002:set': expected strings"),
        ("? [a, b]\n: 1", "run.yaml:1: not YAML: a key that is a list or a mapping"),
        ("local: {lr: " + "x" * 5000 + "}", "run.yaml:1: local.lr: no schedule 'xxx"),
        ("x" * 1000 + ": 1", "no such key"),
        ("sample: {count: " + "[1, " * 30 + "]" * 30 + "}", "run.yaml:1: "),
    ],
)  # fmt: skip
def test_odd_values_are_refused_in_a_sentence_with_their_line(text, message):
    assert message in quickly(text)


@pytest.mark.parametrize(
    "change",
    [
        "rounds=" + "9" * 5000,
        "local.steps." + "9" * 5000 + "=1",
        "local.steps.\u00b2=1",
        "name=a\0b",
        "\udcff=1",
        "data.options={x: &a [*a]}",
        "data.options=" + "[" * 5000,
        "local.lr=!!float x",
        "compress.compressor={kind: top_k, ratio: " + "1" * 5000 + "/3}",
        "compress.compressor={kind: top_k, ratio: \u00b2/3}",
    ],
)
def test_odd_changes_are_refused_in_a_sentence_that_can_be_printed(change):
    with pytest.raises(ConfigError) as caught:
        from_yaml("", [change])
    str(caught.value).encode()
    assert len(str(caught.value)) < 2000
