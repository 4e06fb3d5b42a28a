"""Tables at sites: a schema is agreed on, travels with the enrollment, and gives the bits of a simulation."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings

import hansa
from data.tables import TRIALS, Tables, tables
from federation.problems import LocalSites, server
from hansa.config import build, from_yaml
from hansa.core.errors import HansaError
from hansa.data import Schema, TableColumn
from hansa.data.csv_folder import read_tables
from hansa.engine import Serial
from hansa.federation.messages import Refusal
from hansa.federation.policy import Policy
from hansa.federation.schema_agreement import SchemaRequest, agree_schema
from hansa.federation.site import Agent, DataSource
from hansa.rounds import wire_format
from hansa.runs.experiment import build_run
from hansa.runs.export import predict_from_folder
from hansa.runs.folder import RunFolder
from hansa.runs.preprocessing import read_preprocessing

TEXT = """
name: tables
rounds: 3
workers: 1
seed: 4
data: {{name: csv-folder, options: {{schema: {schema}, test: 0.25}}}}
model: logistic
local: {{lr: 0.1, steps: 3, batch_size: 5}}
checkpoint: {{every: 1}}
"""
OPEN = Policy.model_validate({"table": {"moments": True, "rows": 1}, "min_rows": 1})
FILES = {
    "north": ("age,ward,y\n", [f"{30 + 7 * i % 41}.5,{'icu' if i % 3 else 'surgery'},{i % 2}" for i in range(17)]),
    "south": (
        "ward,y,age\n",
        [f"{'cardio' if i % 2 else 'surgery'},{int(i % 4 == 0)},{i * 3 or ''}" for i in range(13)],
    ),
}
DRAFT = Schema((
    TableColumn("age", "number", missing="mean", scale="pooled"),
    TableColumn("ward", "category", ("cardio", "icu", "surgery")),
    TableColumn("y", "target", ("0", "1")),
))  # fmt: skip


class TableSites(LocalSites):
    """Sites with a CSV file each."""

    def __init__(self, folder: Path, files: Path, policy: Policy = OPEN) -> None:
        super().__init__(folder, [path.stem for path in sorted(files.glob("*.csv"))], policy)
        self.files = files

    def source(self, site: str) -> DataSource:
        return DataSource(build.load_data, tables=lambda schema: read_tables(self.files / f"{site}.csv", schema))


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    for name, (header, rows) in FILES.items():
        (folder / f"{name}.csv").write_text(header + "\n".join(rows) + "\n")
    return folder


@pytest.fixture
def text(tmp_path):
    return TEXT.format(schema=DRAFT.save(tmp_path / "draft.yaml"))


def sites_of(files):
    return "engine={kind: flower, deadline: 60, sites: {" + ", ".join(
        f"{path.stem}: 1" for path in sorted(files.glob("*.csv"))
    ) + "}}"  # fmt: skip


def simulated(files, text, *changes):
    config = from_yaml(text, [f"data.folder={files}", *changes])
    run = build_run(config, build.load_data(config), engine=Serial)
    return run.advance(config.rounds)


def test_the_same_files_give_the_same_bits_simulated_and_served(tmp_path, files, text):
    serving = server(TableSites(tmp_path / "sites", files), sites_of(files), text=text)
    experiment = serving.new(tmp_path / "run")
    experiment.execute()
    expected = simulated(files, text)
    assert serving.schema == expected.task.data.schema
    assert serving.schema["age"].mean is not None
    for name, vector in expected.state.vectors.items():
        assert torch.equal(experiment.run.state.vectors[name], vector)
    record, _ = read_preprocessing(tmp_path / "run" / "preprocessing.json")
    assert record.encoding.schema == serving.schema
    (kept,) = (tmp_path / "sites" / "south").rglob("preprocessing.json")
    counts = read_preprocessing(kept)[1]["cell_counts"]
    assert counts == {"south": {"age": {"missing": 1, "spelled": 0, "unknown": 0}}}  # at the site, and only there
    assert b"cell_counts" not in (tmp_path / "run" / "preprocessing.json").read_bytes()
    model = hansa.load_model(tmp_path / "run")  # no file of a client at the server
    outputs = model.predict(files / "south.csv")
    assert (len(outputs.outputs), model.class_names) == (13, ("0", "1"))
    assert "'cardio'" in repr(RunFolder(tmp_path / "run").load_checkpoint().meta)


def test_statistics_of_a_site_stay_there_and_predict_there(tmp_path, files, text):
    draft = Schema((TableColumn("age", "number", missing="mean", scale="site"), TableColumn("y", "target", ("0", "1"))))
    text = text.replace("draft.yaml", "site.yaml")
    draft.save(tmp_path / "site.yaml")
    sites = TableSites(tmp_path / "sites", files, Policy())
    experiment = server(sites, sites_of(files), text=text).new(tmp_path / "run")
    experiment.execute()
    expected = simulated(files, text)
    assert torch.equal(experiment.run.params, expected.params)
    mean = expected.task.data.encoding.statistics["south"]["age"][0]
    assert not any(repr(mean).encode() in answer for _, _, answer in sites.seen)
    with pytest.raises(HansaError, match="They stay at the sites"):
        predict_from_folder(tmp_path / "run", files / "south.csv", site="south")
    (record,) = (tmp_path / "sites" / "south").rglob("preprocessing.json")
    found = predict_from_folder(tmp_path / "run", files / "south.csv", site="south", preprocessing=record)
    data = expected.task.data
    rows = data.encoding.inputs(files / "south.csv", "south")
    assert torch.equal(found.outputs, hansa.predict(expected.model, rows))


def test_a_server_resumes_with_the_agreed_schema(tmp_path, files, text):
    sites = TableSites(tmp_path / "sites", files)
    first = server(sites, sites_of(files), text=text).new(tmp_path / "run")

    def killed(run, record):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.execute([killed])
    sites.kill("north")
    again = server(sites, sites_of(files), text=text).resume(tmp_path / "run")
    again.execute()
    assert torch.equal(again.run.params, simulated(files, text).params)


@settings(max_examples=TRIALS, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(each=tables())
def test_random_tables_are_encoded_alike_in_a_simulation_and_at_sites(tmp_path_factory, each: Tables):
    place = tmp_path_factory.mktemp("random")
    files = each.write(place / "files")
    test = "" if each.draft.split is not None else ", test: 0.25"
    text = TEXT.replace(", test: 0.25", test).format(schema=each.draft.save(place / "draft.yaml"))
    config = from_yaml(text, [f"data.folder={files}"])
    whole = build.load_data(config)
    sites = TableSites(place / "sites", files)
    schema = agree_schema(sites, list(sites.sites), each.draft, config)
    assert schema == whole.schema
    for client, site in enumerate(sites.sites):
        own = sites.agent(site)._encode_tables(from_yaml(text), schema.to_json())
        assert torch.equal(own.inputs, whole.inputs[whole.rows(client)])
        assert torch.equal(own.targets, whole.targets[whole.rows(client)])
        if own.test_inputs is not None:
            assert torch.equal(own.test_inputs, whole.test_inputs[whole.test_owners == client])


def refusal(sites, *changes, text):
    with pytest.raises(HansaError) as error:
        server(sites, *changes, text=text).enroll_sites()
    return str(error.value)


@pytest.mark.parametrize(
    ("cell", "code"),
    [("CANARY-7f3a,surgery,1", "column 'age': not-a-number"), ("3,surgery,", "column 'y': value-missing")],
)
def test_a_site_that_does_not_fit_names_a_schema_column_and_nothing_else(tmp_path, files, text, cell, code, caplog):
    (files / "north.csv").write_text("age,ward,y\n4,icu,0\n" + cell + "\n")
    sites = TableSites(tmp_path / "sites", files)
    with caplog.at_level(logging.ERROR, logger="hansa"):
        message = refusal(sites, sites_of(files), text=text)
    assert message == f"site north does not take part: schema: {code}"
    assert "north.csv, line 3" in caplog.text, "the site's own log has the place"
    assert not any(b"CANARY" in answer or b"north.csv" in answer for _, _, answer in sites.seen)


def test_a_column_that_the_schema_lacks_is_never_named(tmp_path, files, text):
    (files / "north.csv").write_text("age,ward,CANARY,y\n4,icu,CANARY,0\n5,surgery,CANARY,1\n6,icu,CANARY,1\n")
    sites = TableSites(tmp_path / "sites", files)
    server(sites, sites_of(files), text=text).new(tmp_path / "run").execute()
    assert not any(b"CANARY" in answer for _, _, answer in sites.seen)
    (files / "north.csv").write_text("CANARY,ward,y\n4,icu,0\n5,surgery,1\n")
    message = refusal(TableSites(tmp_path / "other", files), sites_of(files), text=text)
    assert message == "site north does not take part: schema: column 'age': column-missing"


def test_by_default_no_sum_leaves_a_site(tmp_path, files, text):
    sites = TableSites(tmp_path / "sites", files, Policy())
    assert "schema: column 'age': not-agreed" in refusal(sites, sites_of(files), text=text)
    assert not any(b"icu" in answer or b"surgery" in answer for _, _, answer in sites.seen)
    few = Policy.model_validate({"table": {"moments": True, "rows": 100}})
    assert "column 'age': too-few-rows" in refusal(TableSites(tmp_path / "few", files, few), sites_of(files), text=text)
    closed = build.load_data(from_yaml(text, [f"data.folder={files}"])).schema.save(tmp_path / "closed.json")
    sites = TableSites(tmp_path / "closed", files, Policy())
    served = server(sites, sites_of(files), f"data.options.schema={closed}", text=text)
    experiment = served.new(tmp_path / "run")
    experiment.execute()
    assert torch.equal(experiment.run.params, simulated(files, text).params)


def test_sites_never_encode_alone(tmp_path, files):
    """Without a schema at the server, sites with their own encodings are refused, and both sides are named."""
    section = "{{name: csv-folder, options: {{schema: {schema}, test: 0.25}}}}"
    text = TEXT.replace(section, "{{name: synthetic, clients: 2}}").format()
    sites = TableSites(tmp_path / "tables", files)
    assert "no-schema: the site has tables, which need a schema" in refusal(sites, sites_of(files), text=text)

    class Alone(TableSites):
        def source(self, site):
            return DataSource(lambda _: hansa.data.from_csv_folder(self.files / f"{site}.csv", "y", missing="mean"))

    message = refusal(Alone(tmp_path / "alone", files), sites_of(files), text=text)
    assert "encodes its table by the schema" in message
    assert "site north" in message
    assert "site south" in message


def test_a_question_for_another_site_is_refused(tmp_path, files):
    agent = TableSites(tmp_path, files).agent("north")
    answer = agent.handle(SchemaRequest("south", DRAFT.to_json()).to_bytes())
    assert (wire_format.kind_of(answer), Refusal.from_bytes(answer).reason) == ("refused", "site")
    answer = agent.handle(SchemaRequest("north", "no schema").to_bytes())
    assert Refusal.from_bytes(answer).reason == "schema"


def test_a_site_answers_one_question_for_sums_however_often_it_is_repeated(tmp_path, files):
    """Two answers on rows that the server chooses differ by the rows that it moved to the test rows."""
    sites = TableSites(tmp_path / "sites", files)

    def ask(seed: int, policy: Policy = OPEN) -> str:
        agent = Agent("north", sites.source("north"), tmp_path / "kept", policy)  # the counts outlast the process
        answer = agent.handle(SchemaRequest("north", DRAFT.to_json(), 0.25, seed).to_bytes())
        kind = wire_format.kind_of(answer)
        return Refusal.from_bytes(answer).reason if kind == Refusal.kind else kind

    assert [ask(seed) for seed in (0, 0, 1, 0, 2)] == ["summary", "summary", "budget", "summary", "budget"]
    more = Policy.model_validate({"table": {"moments": True, "rows": 1, "answers": 2}, "min_rows": 1})
    assert [ask(seed, more) for seed in (1, 2, 1)] == ["summary", "budget", "summary"]
