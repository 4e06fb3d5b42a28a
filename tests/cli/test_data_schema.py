"""`hansa data schema`: a schema of files, and whether files fit one."""

from __future__ import annotations

from hansa.data import Schema


def test_a_schema_is_inferred_written_and_checked(cli, folder):
    (folder / "sites").mkdir()
    (folder / "sites" / "north.csv").write_text(
        "age,ward,who,fold,y\n40,icu,a,train,1\n50,icu,b,train,0\n?,icu,c,test,0\n"
    )
    (folder / "sites" / "south.csv").write_text("age,ward,who,fold,y\n60,surgery,d,train,1\n")
    words = ["data", "schema", "sites", "--target", "y", "--option", "ids=[who]", "--option", "split=fold"]
    shown = cli.ok(*words)
    assert "categories: [icu, surgery]" in shown.stdout
    written = cli.ok(*words, "-o", "schema.yaml")
    schema = Schema.load(folder / "schema.yaml")
    assert (schema["age"].mean, schema["age"].missing, schema["who"].kind) == (50.0, "indicator", "id")
    assert schema.sha256 in written.stdout
    cli.ok("data", "schema", "sites", "--check", "schema.yaml")
    (folder / "sites" / "south.csv").write_text("age,ward,who,fold,y\n60,garden,d,train,1\n")
    wrong = cli("data", "schema", "sites", "--check", "schema.yaml")
    assert wrong.exit_code == 1
    assert "south.csv, line 2: 'ward' is 'garden'" in wrong.stdout
    assert "fits" in wrong.stdout
    cli.refused("data", "schema", "sites")
    assert "drops" in cli("data", "schema", "sites", "--target", "y", "--option", "drops=[who]").output
    cli.refused("data", "schema", "sites", "--target", "y", "-o", "schema.txt")


def test_files_are_checked_by_an_open_schema_as_by_a_closed_one(cli, folder):
    """It said "fits" of values that the schema does not list, as long as a mean was open."""
    (folder / "sites").mkdir()
    (folder / "sites" / "a.csv").write_text("age,ward,y\n40,garden,1\n50,icu,0\n")
    columns = "[{name: age, kind: number, scale: pooled}, {name: ward, kind: category, categories: [icu]%s}, %s]"
    target = "{name: y, kind: target, categories: ['0', '1']}"
    for name, unknown, last in (("open", "", target), ("zero", ", unknown: zero", target),
                                ("class", ", unknown: zero", target.replace("'1'", "'2'"))):  # fmt: skip
        (folder / f"{name}.yaml").write_text(f"hansa_schema: 1\ncolumns: {columns % (unknown, last)}\n")
    wrong = cli("data", "schema", "sites", "--check", "open.yaml")
    assert (wrong.exit_code, "'ward' is 'garden'" in wrong.stdout) == (1, True)
    fits = cli("data", "schema", "sites", "--check", "zero.yaml")
    assert (fits.exit_code, "ward: 1 unknown" in fits.stdout) == (0, True)
    wrong = cli("data", "schema", "sites", "--check", "class.yaml")
    assert (wrong.exit_code, "'y' is '1'" in wrong.stdout) == (1, True)


def test_cells_that_a_spreadsheet_would_run_are_texts(cli, folder):
    (folder / "sites").mkdir()
    for name in ("=cmd()", "@b"):
        rows = "".join(f"{place},{'=1+1' if place > 9 else 'well'}\n" for place in range(20))
        (folder / "sites" / f"{name}.csv").write_text("age,state\n" + rows)
    data = "data={name: csv-folder, folder: sites, options: {target: state, scale: pooled}}"
    words = ["run", "--preset", "fedavg", "--set", data, "--set", "model=logistic", "--set", "local.lr=1.0"]
    cli.ok(*words, "--rounds", "5", "--out", "x", "-q")
    cli.ok("export", "x", "-o", "clients.csv")
    clients = (folder / "clients.csv").read_text("utf-8")
    assert ",'=cmd()" in clients
    assert ",=" not in clients
    assert ",'@b" in clients
    assert ",@" not in clients
    (folder / "new.csv").write_text("age\n0\n19\n")
    cli.ok("predict", "x", "new.csv")
    lines = (folder / "predictions.csv").read_text("utf-8").split()
    assert lines[0] == "row,prediction,class"
    assert sorted(line.split(",")[2] for line in lines[1:]) == ["'=1+1", "well"]
    exported = cli("export", "x", "-o", "model.safetensors")
    assert "preprocessing: model.safetensors.preprocessing.json (schema " in exported.stdout.replace("\n", "")
    cli.ok("predict", "model.safetensors", "new.csv", "-o", "again.csv")
    assert (folder / "again.csv").read_bytes() == (folder / "predictions.csv").read_bytes()
