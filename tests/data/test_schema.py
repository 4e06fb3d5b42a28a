"""Schemas of tables and folders of CSV files: exact moments, encodings by hand, and errors that name the cell."""

from __future__ import annotations

import contextlib
import json
import random
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hansa
from data.tables import TRIALS, Tables, tables
from hansa.data import Schema, SchemaMisfitError, SplitColumn, TableColumn, TableEncoding, from_csv_folder, infer_schema
from hansa.data.csv_folder import HOSPITALS
from hansa.data.schema import (
    MISFIT_CODES,
    CellCounts,
    Moments,
    Table,
    as_table,
    complete,
    encode,
    read_csv,
    table_moments,
)
from hansa.runs.preprocessing import Preprocessing
from mistakes import refused

finite = st.floats(allow_nan=False, allow_infinity=False)


def table(name="north", **columns):
    cells = {column: [str(value) for value in values] for column, values in columns.items()}
    return Table(name, f"{name}.csv", cells, range(2, 2 + len(next(iter(cells.values())))))


@settings(max_examples=150, deadline=None)
@given(st.lists(finite, min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_moments_are_exact_in_any_order_and_any_division(values, draw):
    whole = Moments.of(np.array(values))
    assert whole.total == sum(map(Fraction, values))
    assert whole.squares == sum(Fraction(value) ** 2 for value in values)
    shuffled = draw.sample(values, len(values))
    cut = draw.randint(0, len(values) - 1)
    merged = Moments.of(np.array(shuffled[cut:]))
    if cut:
        merged = merged.merge(Moments.of(np.array(shuffled[:cut])))
    assert merged == whole
    assert Moments.from_json(json.loads(json.dumps(merged.to_json()))) == whole


def test_means_and_deviations_are_correctly_rounded():
    values = np.random.default_rng(0).normal(size=3000) * 10.0 ** np.random.default_rng(1).integers(-9, 9, 3000)
    mean, std = Moments.of(values).mean_and_std()
    assert mean == float(sum(map(Fraction, values.tolist())) / 3000)
    assert std == pytest.approx(values.std(), rel=1e-12)
    with pytest.raises(hansa.HansaError, match="rescale"):
        Moments.of(np.array([1e200, -1e200])).mean_and_std()
    assert Moments.of(np.array([7.0, 7.0])).mean_and_std() == (7.0, 1.0)


IMPOSSIBLE = (
    [0, "0/0", "0/0"], [2, "4/0", "1/0"], [1, "zz/0", "0/0"], [1, "1/9999", "1/0"], ["1", "0/0", "0/0"], 3
)  # fmt: skip
test_impossible_moments_are_refused = refused(*((each, "moments") for each in IMPOSSIBLE), by=Moments.from_json)


SCHEMA = Schema(
    (
        TableColumn("age", "number", missing="indicator", scale="pooled", mean=50.0, std=10.0),
        TableColumn("ward", "category", ("surgery", "icu"), missing="indicator"),
        TableColumn("stage", "ordinal", ("low", "middle", "high"), missing="constant", fill=-1),
        TableColumn("admitted", "date", format="%d.%m.%Y"),
        TableColumn("note", "text_length"),
        TableColumn("weight", "number", missing="mean", mean=70.0),
        TableColumn("patient", "id"),
        TableColumn("ill", "target", ("no", "yes")),
    ),
    SplitColumn("fold", ("test",), ("train",)),
)
ROWS = table(
    age=[60, "", "45.0"], ward=["icu", "surgery", "NA"], stage=["high", "?", "low"], weight=["", 80, 75.5],
    admitted=["02.01.1970", "01.01.1970", "31.12.1969"], note=["ab", "abc", "a"], patient=["x", "y", "z"],
    ill=["yes", "no", "yes"], fold=["train", "test", "train"],
)  # fmt: skip


def test_an_encoding_by_hand():
    points = Schema((TableColumn("cp", "category", ("1", 2.0)),))  # integers with and without a point are one category
    assert encode(points, table(cp=["1.0", "2", "1"])).inputs.tolist() == [[1, 0], [0, 1], [1, 0]]
    encoded = encode(SCHEMA, ROWS, training=True)
    assert SCHEMA.inputs == (
        "age", "age is missing", "ward=surgery", "ward=icu", "ward is missing", "stage", "admitted", "note", "weight",
    )  # fmt: skip
    assert encoded.inputs.tolist() == [
        [1, 0, 0, 1, 0, 2, 1, 2, 70],
        [0, 1, 1, 0, 0, -1, 0, 3, 80],
        [-0.5, 0, 0, 0, 1, 0, -1, 1, 75.5],
    ]
    assert encoded.targets.tolist() == [1, 0, 1]
    assert encoded.is_test.tolist() == [False, True, False]


def test_forms_and_the_hash(tmp_path):
    assert Schema.load(SCHEMA.save(tmp_path / "schema.yaml")) == SCHEMA
    (tmp_path / "schema.json").write_text(SCHEMA.to_json())
    assert Schema.load(tmp_path / "schema.json") == SCHEMA
    again = Schema.from_json(SCHEMA.to_json())
    assert again.sha256 == SCHEMA.sha256
    assert hash(again) == hash(SCHEMA)
    renamed = Schema(SCHEMA.columns, SCHEMA.split, name="other")
    assert renamed.sha256 == SCHEMA.sha256, "the name is for messages"
    turned = Schema((SCHEMA.columns[1], SCHEMA.columns[0], *SCHEMA.columns[2:]), SCHEMA.split)
    ward = replace(SCHEMA["ward"], categories=("icu", "surgery"))
    other = replace(SCHEMA, columns=(SCHEMA.columns[0], ward, *SCHEMA.columns[2:]))
    assert len({SCHEMA.sha256, turned.sha256, other.sha256}) == 3


WARD, NUMBER = "kind: category, categories: [a]", "kind: number"


test_a_wrong_column_is_named = refused(
    ("kind: numbr", "kind='numbr': expected one of number, category"),
    ("kind: category, categories: [yes, no]", "Quote it"),
    ("kind: category, categories: [a, a]", "every text once"),
    ("kind: category", "a list of the values, which `hansa data schema` finds"),
    ("kind: category, categories: [a, b], spellings: {a: [b]}", "other spellings"),
    ("kind: category, categories: [a], spellings: {a: b}", "'b': expected a list of texts"),
    ("kind: ordinal", "in increasing order"),
    (f"{WARD}, missing: mean", "refuse, indicator or constant"),
    (f"{WARD}, missing: constant, fill: b", "one of the categories"),
    (f"{WARD}, scale: pooled", "scale='pooled': expected its default"),
    (f"{NUMBER}, missing: constant", "fill=None"),
    (f"{NUMBER}, fill: 3", "none with missing: refuse"),
    (f"{NUMBER}, mean: 3", "neither scaled pooled"),
    (f"{NUMBER}, mean: many", "mean='many': expected a finite number"),
    (f"{NUMBER}, scale: pooled, mean: 3, std: 0", "above 0"),
    (f"{NUMBER}, target: class", "target='class'"),
    (f"{NUMBER}, scales: pooled", "unexpected keyword argument 'scales'.*Keys of a column: .*scale"),
    ("kind: target, categories: [a], missing: mean", "missing='mean': expected its default"),
    by=lambda column: Schema.from_yaml(
        f"{{hansa_schema: 1, columns: [{{name: c, {column}}}, {{name: x, kind: number}}]}}"
    ),
)
test_a_wrong_schema_is_named = refused(
    ("{}", "^file.yaml: .*a mapping with hansa_schema"),
    ("{hansa_schema: 1, columns: []}", "expected at least one"),
    ("{hansa_schema: 1, columns: [&x {name: x, kind: number}, *x]}", "'x' is listed twice"),
    ("{hansa_schema: 1, columns: [{name: y, kind: target, target: number}]}", "no column of inputs"),
    ("{hansa_schema: 1, columns: [{name: x, kind: number}], split: x}", "'x' is listed twice"),
    ("{hansa_schema: 1, columns: [{name: x, kind: number}], colums: 1}", "unexpected keyword argument 'colums'"),
    ("{hansa_schema: 1, columns: [{name: x, kind: number}], missing_values: NA}", "expected a list of texts"),
    ("{hansa_schema: 1, columns: [", "^file.yaml: .*not the text of a schema"),
    by=lambda content: Schema.from_yaml(content, "file.yaml"),
)


@pytest.mark.parametrize(
    ("change", "code", "column"),
    [
        ({"age": None}, "column-missing", "age"),
        ({"age": ["old", 1, 1]}, "not-a-number", "age"),
        ({"age": ["inf", 1, 1]}, "not-finite", "age"),
        ({"weight": [1, 1, "1e300"]}, "not-finite", "weight"),
        ({"ward": ["garden", "icu", "icu"]}, "unknown-category", "ward"),
        ({"stage": ["highest", "low", "low"]}, "unknown-category", "stage"),
        ({"admitted": ["1970-01-01"] * 3}, "not-a-date", "admitted"),
        ({"note": ["", "a", "a"]}, "value-missing", "note"),
        ({"ill": ["maybe", "no", "no"]}, "unknown-category", "ill"),
        ({"ill": ["", "no", "no"]}, "value-missing", "ill"),
        ({"fold": ["dev", "test", "train"]}, "split-value", "fold"),
        ({"fold": ["test"] * 3}, "no-training-rows", "fold"),
    ],
)
def test_a_misfit_has_a_code_and_a_schema_column_and_its_message_the_place(change, code, column):
    columns = {**ROWS.columns, **change}
    wrong = table(**{name: cells for name, cells in columns.items() if cells is not None})
    with pytest.raises(SchemaMisfitError) as caught:
        encode(SCHEMA, wrong, training=True)
    assert (caught.value.code, caught.value.column) == (code, column)
    assert code in MISFIT_CODES
    assert "north.csv" in str(caught.value)
    with pytest.raises(SchemaMisfitError, match="deviation of 'age' is still open"):
        encode(Schema((TableColumn("age", "number", scale="pooled"),)), ROWS)


def test_frames_of_all_kinds_are_one_table():
    pandas = pytest.importorskip("pandas")
    expected = TableEncoding(SCHEMA).inputs(ROWS)
    columns = {name: list(cells) for name, cells in ROWS.columns.items()}
    numeric = {**columns, "age": [60, None, 45.0], "ward": ["icu", "surgery", None], "weight": [float("nan"), 80, 75.5]}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    frames = [columns, numeric, pandas.DataFrame(columns), pandas.DataFrame(numeric), rows]
    for frame in frames:
        assert torch.equal(TableEncoding(SCHEMA).inputs(frame), expected)
    assert TableEncoding(SCHEMA).targets({"age": [1]}) is None
    with pytest.raises(hansa.HansaError, match="expected a CSV file"):
        as_table(3)


def test_statistics_of_a_site_scale_only_its_own_rows():
    schema = Schema((TableColumn("age", "number", scale="site"), TableColumn("y", "target", target="number")))
    ages = {"north": [40, 50, 60], "south": [1, 3]}
    encoded = {name: encode(schema, table(name, age=each, y=each), training=True) for name, each in ages.items()}
    assert encoded["south"].inputs.ravel().tolist() == [-1, 1]
    encoding = TableEncoding(schema, {name: each.statistics for name, each in encoded.items()})
    assert encoding.inputs({"age": [5]}, "south").tolist() == [[3.0]]
    with pytest.raises(SchemaMisfitError, match=r"'age' is scaled by site: expected the client.*Known: north, south"):
        encoding.inputs({"age": [5]})


def test_spellings_unknown_and_missing_cells_are_counted(tmp_path, caplog):
    ward = TableColumn("ward", "category", ("icu", "surgery"), "indicator", unknown="zero",
                       spellings={"icu": ["ICU", "intensive"]})  # fmt: skip
    schema = Schema((ward, TableColumn("y", "target", ("no", "yes"), spellings={"yes": ["y", "1"]})))
    assert Schema.load(schema.save(tmp_path / "schema.yaml")) == schema
    encoded = encode(
        schema,
        training=True,
        table=table(ward=["ICU", "garden", "", "surgery", "roof"], y=["1", "y", "yes", "no", "no"]),
    )
    assert encoded.inputs.tolist() == [[1, 0, 0], [0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 0, 0]]
    assert encoded.targets.tolist() == [1, 1, 1, 0, 0]
    assert encoded.counts == {"ward": CellCounts(missing=1, spelled=1, unknown=2)}
    assert "north.csv: 2 of 5 values of 'ward' are not in the schema" in caplog.text
    folder = tmp_path / "sites"
    folder.mkdir()
    write(folder, a="ward,y\nicu,no\ncellar,yes\n", b="ward,y\nicu,yes\n")
    data = from_csv_folder(folder, schema=schema, test=0)
    assert data.encoding.counts == {"a": {"ward": CellCounts(unknown=1)}}


def test_a_schema_states_how_files_are_written(tmp_path):
    text = "Alter;Ort;krank\n40,5;M\u00fcnchen;ja\n1,25e1;Bonn;nein\n"
    (tmp_path / "a.csv").write_bytes(text.encode("latin-1"))
    form = {"delimiter": ";", "decimal": ",", "encoding": "latin-1"}
    schema = infer_schema(tmp_path / "a.csv", "krank", test=0, **form)
    assert schema.inputs == ("Alter", "Ort=Bonn", "Ort=M\u00fcnchen")
    schema = Schema.load(schema.save(tmp_path / "schema.yaml"))
    data = from_csv_folder(tmp_path / "a.csv", schema=schema, test=0)
    assert data.inputs.tolist() == [[40.5, 0, 1], [12.5, 1, 0]]
    assert TableEncoding(schema).inputs({"Alter": [40.5], "Ort": ["Bonn"]}).tolist() == [[40.5, 1, 0]]
    (tmp_path / "b.csv").write_text("Alter;Ort;krank\n40.5;Bonn;ja\n")
    with pytest.raises(SchemaMisfitError, match=r"'Alter' is '40\.5': not a number"):
        TableEncoding(schema).inputs(tmp_path / "b.csv")
    for wrong in ({"delimiter": ";;"}, {"delimiter": 3}, {"encoding": "utf-9"}, {"encoding": ["utf-8"]}):
        with pytest.raises(hansa.HansaError, match=r"b\.csv: cannot be read as CSV"):
            read_csv(tmp_path / "b.csv", replace(schema, **wrong))


@settings(max_examples=TRIALS, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tables(), st.randoms(use_true_random=False))
def test_the_schema_does_not_depend_on_the_order_of_sites_rows_and_columns(tmp_path_factory, each: Tables, draw):
    folder = each.write(tmp_path_factory.mktemp("tables"))
    files = [read_csv(path) for path in sorted(folder.glob("*.csv"))]
    sums = [table_moments(each.draft, file) for file in files]
    draw.shuffle(sums)
    schema = complete(each.draft, sums)
    if each.draft.split is None:
        return  # the choice of test rows follows the order of rows
    for file in files:
        order = draw.sample(range(file.rows), file.rows)
        names = draw.sample(list(file.columns), len(file.columns))
        turned = Table(file.name, file.source, {n: [file.columns[n][row] for row in order] for n in names}, order)
        first, second = encode(schema, file, training=True), encode(schema, turned, training=True)
        assert np.array_equal(first.inputs[order], second.inputs)
        assert np.array_equal(first.targets[order], second.targets)


@settings(max_examples=TRIALS, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tables())
def test_a_raw_file_predicts_what_was_trained_and_evaluated(tmp_path_factory, each: Tables):
    folder = each.write(tmp_path_factory.mktemp("tables"))
    test = {} if each.draft.split is not None else {"test": 0.3}
    data = from_csv_folder(folder, schema=each.draft, **test)
    assert data.client_names == tuple(sorted(each.files))
    for client, name in enumerate(data.client_names):
        rows = data.encoding.inputs(folder / f"{name}.csv", name)
        targets = data.encoding.targets(folder / f"{name}.csv")
        parts = [(data.inputs[data.rows(client)], data.targets[data.rows(client)])]
        if data.test_inputs is not None:
            is_own = data.test_owners == client
            parts.append((data.test_inputs[is_own], data.test_targets[is_own]))
        pairs = [pair for x, y in parts for pair in zip(x.tolist(), y.tolist(), strict=True)]
        assert sorted(pairs) == sorted(zip(rows.tolist(), targets.tolist(), strict=True))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["columns", "name", "kind", "spellings", "missing_values", "fill",
         "categories", "split", "mean", "names", "hashes", "moments", "sites", "shape",
         "age", "dtype", "classes", "schema", "pixels", "normalize"]), inner, max_size=5),
    max_leaves=15,
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(json_values)
def test_any_plain_data_is_read_or_refused_with_one_error(content):
    marked = {**content, "hansa_schema": 1, "hansa_preprocessing": 1} if isinstance(content, dict) else content
    for read in (Schema.from_dict, Moments.from_json, Preprocessing.from_dict):
        for each in (content, marked):
            with contextlib.suppress(hansa.HansaError):
                read(each)


def write(folder, **files):
    for name, text in files.items():
        (folder / f"{name}.csv").write_text(text)
    return folder


def test_a_folder_by_split_column_missing_values_and_scales(tmp_path):
    write(tmp_path, north="age,ward,fold,y\n30,a,train,1\n,b,train,0\n50,a,test,1\n",
          south="ward,y,age,fold\n?,0,10,train\nc,1,20,test\n")  # fmt: skip
    data = from_csv_folder(tmp_path, "y", split="fold", missing="indicator", scale="pooled")
    assert (data.client_names, data.sizes.tolist()) == (("north", "south"), [2, 1])
    assert data.test_owners.tolist() == [0, 1]
    assert data.schema.inputs == ("age", "age is missing", "ward=a", "ward=b", "ward=c", "ward is missing")
    assert (data.schema["age"].mean, data.schema["age"].std) == (20.0, 10.0)  # of training rows: 30 and 10
    assert data.inputs.tolist() == [[1, 0, 1, 0, 0, 0], [0, 1, 0, 1, 0, 0], [-1, 0, 0, 0, 0, 1]]
    again = from_csv_folder(tmp_path, schema=data.schema)
    assert torch.equal(again.inputs, data.inputs)
    assert torch.equal(again.test_inputs, data.test_inputs)
    site = from_csv_folder(tmp_path, "y", split={"column": "fold", "test": ["test"]}, missing="mean", scale="site")
    assert site.inputs[:, 0].tolist() == [0, 0, 0]
    assert site.test_inputs[:, 0].tolist() == [20, 10]  # (50 - 30) / 1, (20 - 10) / 1
    for arguments, message in [
        ({"split": "fold", "test": 0.5}, "'fold' divides the rows"),
        ({"split": "ward"}, "'ward' is 'a': expected one of train, test"),
        ({"schema": data.schema, "drop": ["age"]}, "or else a schema alone"),
        ({"scale": "all"}, "scale='all': expected one of none, site, pooled"),
    ]:
        target = {} if "schema" in arguments else {"target": "y", "missing": "indicator"}
        with pytest.raises(hansa.HansaError, match=message):
            from_csv_folder(tmp_path, **target, **arguments)


def test_an_inferred_schema_gives_the_data_of_the_folder(tmp_path):
    draw = random.Random(1)
    for site in ("a", "b"):
        rows = "".join(f"{draw.gauss(0, 9)!r},{draw.choice('xyz')},{draw.randint(0, 1)}\n" for _ in range(20))
        write(tmp_path, **{site: "v,kind,y\n" + rows})
    schema = infer_schema(tmp_path, "y", scale="pooled", missing="refuse")
    first = from_csv_folder(tmp_path, "y", scale="pooled")
    assert first.schema == schema
    second = from_csv_folder(tmp_path, schema=schema.save(tmp_path / "schema.yaml"))
    assert torch.equal(first.inputs, second.inputs)
    assert infer_schema(tmp_path, "y", ids=["kind"]).inputs == ("v",)
    write(tmp_path, a="x,y\n" + "1,0\n" * 100)  # a fraction of test rows is that of its decimal form
    assert len(from_csv_folder(tmp_path / "a.csv", "y", test=0.29).test_targets) == 29


NORTH = "age,ward,y\n30,b,1\n41.5,a,0\n52,b,1\n33,a,0\n60,c,1\n"
SOUTH = "ward,y,age\na,0,20\nc,1,21\n"  # the same columns in another order


@pytest.fixture
def sites(tmp_path):
    (tmp_path / "north.csv").write_text(NORTH)
    (tmp_path / "south.csv").write_text(SOUTH)
    return tmp_path


def test_numbers_stay_words_become_columns_and_files_are_clients(sites):
    held = from_csv_folder(sites, "y", test=0)
    assert held.sizes.tolist() == [5, 2]
    assert held.test_inputs is None
    rows = held.inputs[held.rows(1)]
    assert rows.tolist() == [[20, 1, 0, 0], [21, 0, 0, 1]]  # age, then ward a, b, c
    assert held.inputs[held.rows(0)][1].tolist() == [41.5, 1, 0, 0]
    assert held.targets[held.rows(0)].tolist() == [1, 0, 1, 0, 1]
    assert (held.targets.dtype, held.classes) == (torch.int64, 2)


def test_a_share_of_every_client_is_for_testing_by_the_seed(sites):
    held = from_csv_folder(sites, "y", test=0.5, seed=3)
    assert held.sizes.tolist() == [3, 1]
    assert len(held.test_targets) == 3
    assert held.test_owners.tolist() == [0, 0, 1]
    everything = sorted(map(tuple, torch.cat([held.inputs, held.test_inputs]).tolist()))
    assert everything == sorted(map(tuple, from_csv_folder(sites, "y", test=0).inputs.tolist()))
    again = from_csv_folder(sites, "y", test=0.5, seed=3)
    assert torch.equal(again.test_inputs, held.test_inputs)


def test_targets_may_be_words_numbers_or_numbers_by_wish(sites):
    words = from_csv_folder(sites, "ward", test=0)
    assert words.targets.tolist() == [1, 0, 1, 0, 2, 0, 2]
    assert words.classes == 3
    assert from_csv_folder(sites, "y", kind="number", test=0).targets.dtype == torch.float32
    ages = from_csv_folder(sites, "age", test=0)
    assert ages.classes is None
    assert ages.targets.tolist() == [30, 41.5, 52, 33, 60, 20, 21]
    assert from_csv_folder(sites, "y", drop=["ward"], test=0).shape == (1,)
    (sites / "dates.csv").write_text("seen,y\n1970-01-02,0\n1970-01-04,1\n1970-01-03T12:00:00,1\n")
    dates = from_csv_folder(sites / "dates.csv", "y", test=0)
    assert (dates.schema["seen"].kind, dates.inputs.tolist()) == ("date", [[1.0], [3.0], [2.5]])


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("age,ward,y\n1,a,0\n,b,1\n", {}, r"east.csv, line 3: 'age' is empty"),
        ("age,ward,y\n1,a,0\n2,b\n", {}, r"east.csv, line 3: 2 values for 3 columns"),
        ("age,ward\n1,a\n", {}, r"no column 'y'|other columns than east.csv: 'y'"),
        ("age,ward,y,z\n1,a,0,3\n", {}, r"other columns than east.csv: 'z'"),
        ("age,age,y\n1,2,0\n", {}, r"has a column twice"),
        ("age,ward,y\n", {}, r"a header and at least one row"),
        (NORTH, {"target": "Y"}, r"no column 'Y'. Known: age, ward, y"),
        (NORTH, {"drop": ["wards"]}, r"no column 'wards'. Did you mean ward"),
        (NORTH, {"drop": ["ward", "age"]}, r"no column of inputs"),
        (NORTH, {"test": 1}, r"test=1\): expected 0 <= test < 1"),
        (NORTH, {"kind": "bool"}, r"kind='bool'"),
        ("age,ward,y\n1,a,yes\n", {"kind": "number"}, r"east.csv, line 2: 'y' is 'yes': not a number"),
        ('age,ward,y\n1,"a,0\n', {}, r"cannot be read as CSV"),
        ("age,ward,y\n" + "".join(f"1,name{at},0\n" for at in range(101)), {}, "104 different texts.*drop"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(sites, text, options, message):
    (sites / "east.csv").write_text(text)
    with pytest.raises(hansa.HansaError, match=message):
        from_csv_folder(sites, **{"target": "y", **options})


def test_a_header_has_a_bound_and_a_folder_has_tables(tmp_path):
    names = ",".join(f"c{place}" for place in range(50_000))
    assert len(read_csv("wide.csv", text=f"{names}\n{',' * 49_999}\n").columns) == 50_000
    with pytest.raises(hansa.HansaError, match="150000 columns: expected at most 100000"):
        read_csv("wider.csv", text=f"{names},{names},{names}\n1\n")
    with pytest.raises(hansa.HansaError, match=r"no .csv files"):
        from_csv_folder(tmp_path / "none", "y")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=80) | st.text(alphabet='ay,\n"0.1\r\0 ', max_size=60).map(str.encode))
def test_any_bytes_are_data_or_one_error(tmp_path, content):
    (tmp_path / "any.csv").write_bytes(b"a,y\n" + content)
    try:
        held = from_csv_folder(tmp_path, "y", test=0)
    except hansa.HansaError as problem:
        told = str(problem)
        held = None
    assert "any.csv" in told if held is None else torch.isfinite(held.inputs).all()


# ---- the embedded tables of four hospitals


def test_the_data_set_has_the_hospitals_as_clients():
    data = hansa.data.federate("heart-disease", test=0.25)
    assert data.client_names == HOSPITALS
    owned = data.sizes + torch.bincount(data.test_owners)
    assert owned.tolist() == [303, 294, 123, 200]
    info = hansa.data.dataset_info("heart-disease")
    assert (data.shape, data.classes) == (info.shape, info.classes)
    sick = [
        int(data.targets[data.rows(client)].sum() + data.test_targets[data.test_owners == client].sum())
        for client in range(4)
    ]
    assert sick == [139, 106, 115, 149]  # of UCI's documentation
    assert abs(data.inputs[:, 0].mean()) < 1e-6


def test_the_files_give_the_data_of_the_data_set(tmp_path):
    hansa.data.download("heart-disease", tmp_path)
    folder = tmp_path / "heart-disease"
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["README.txt", "schema.yaml", *(f"{name}.csv" for name in HOSPITALS)]
    )
    licence = (folder / "README.txt").read_text()
    assert "CC BY 4.0" in licence
    assert all(name in licence for name in ("Janosi", "Steinbrunn", "Pfisterer", "Detrano"))
    assert Schema.load(folder / "schema.yaml").is_open
    by_file = hansa.data.from_csv_folder(folder, schema=folder / "schema.yaml", test=0.25)
    by_name = hansa.data.federate("heart-disease", test=0.25)
    assert torch.equal(by_file.inputs, by_name.inputs)
    assert torch.equal(by_file.test_targets, by_name.test_targets)
