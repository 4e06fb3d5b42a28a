"""Models as ONNX graphs that contain their preprocessing.

The graph of a table takes one input of shape [rows, 1] per column of the schema: texts for categories and ordinal
values, float64 for numbers, for dates the days since 1970-01-01, for text lengths the number of characters. NaN, and
the texts of missing values, are missing. A graph cannot refuse rows: an unknown category sets no 0/1 input.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hansa.core.errors import HansaError
from hansa.data import Schema, TableColumn
from hansa.runs.preprocessing import Preprocessing
from hansa.runs.store import io

ENCODED = "encoded"
_INDEX = re.compile("-?[0-9]+")


def write_onnx(module: nn.Module, example: Tensor, path: Path, record: Preprocessing) -> None:
    """Write a module, with the preprocessing of its run, as an ONNX file."""
    try:
        import onnx
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise HansaError("export to ONNX needs two packages: pip install 'hansa[onnx]'.") from error
    encoding = record.encoding
    if encoding is not None and any(column.scale == "site" for column in encoding.schema):
        name = next(column.name for column in encoding.schema if column.scale == "site")
        raise HansaError(
            f"export to ONNX: {name!r} is scaled by site, and a graph has one scale. Use scale: pooled, or export .pt."
        )
    partial_path = path.with_name(path.name + ".part")
    torch.onnx.export(
        module,
        (example,),
        str(partial_path),
        input_names=["inputs"],
        output_names=["outputs"],
        dynamic_shapes={"inputs": ({0: torch.export.Dim("rows")},)},
        dynamo=True,
        external_data=False,
        verbose=False,
    )
    graph = onnx.load(partial_path)
    partial_path.unlink()
    if encoding is not None:
        graph = _with_schema(graph, encoding.schema)
    properties = {"hansa_preprocessing": json.dumps(record.to_dict()), "hansa_preprocessing_sha256": record.sha256}
    onnx.helper.set_model_props(graph, properties)
    onnx.checker.check_model(graph)
    io.write_file(path, graph.SerializeToString())


def _with_schema(graph: Any, schema: Schema) -> Any:
    """Return a graph that encodes the columns of a table and then applies the model."""
    import onnx

    graph = onnx.compose.add_prefix(graph, "model/", rename_inputs=True, rename_outputs=True)
    opsets = {each.domain: each.version for each in graph.opset_import}
    encoder = GraphEncoder(schema)
    before = onnx.helper.make_model(
        onnx.helper.make_graph(encoder.nodes, "schema", encoder.inputs, [encoder.output], encoder.constants),
        opset_imports=[*graph.opset_import, onnx.helper.make_opsetid("ai.onnx.ml", 3)]
        if "ai.onnx.ml" not in opsets
        else graph.opset_import,
        ir_version=graph.ir_version,
    )
    if "ai.onnx.ml" not in opsets:
        graph.opset_import.append(onnx.helper.make_opsetid("ai.onnx.ml", 3))
    return onnx.compose.merge_models(before, graph, io_map=[(ENCODED, "model/inputs")])


class GraphEncoder:
    """The nodes that encode a table by its schema, in the arithmetic of `encoding.encode`."""

    def __init__(self, schema: Schema) -> None:
        from onnx import TensorProto, helper

        self.schema, self.helper, self.types = schema, helper, TensorProto
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.inputs: list[Any] = []
        parts = [part for column in schema if column.inputs for part in self._encode(column)]
        self._node("Concat", parts, ENCODED, axis=1)
        self.output = helper.make_tensor_value_info(ENCODED, TensorProto.FLOAT, ["rows", len(schema.inputs)])

    def _encode(self, column: TableColumn) -> list[str]:
        texts = column.kind in ("category", "ordinal")
        kind = self.types.STRING if texts else self.types.DOUBLE
        self.inputs.append(self.helper.make_tensor_value_info(column.name, kind, ["rows", 1]))
        return self._category(column) if column.kind == "category" else self._number(column)

    def _category(self, column: TableColumn) -> list[str]:
        assert column.categories is not None
        keys = _spellings(column.categories)
        if column.missing == "indicator":
            keys |= dict.fromkeys(self.schema.missing_values, len(column.categories))
        elif column.missing == "constant":
            keys |= dict.fromkeys(self.schema.missing_values, column.categories.index(str(column.fill)))
        index = self._node("LabelEncoder", [column.name], f"{column.name}/index", domain="ai.onnx.ml",
                           keys_strings=list(keys), values_int64s=list(keys.values()), default_int64=-1)  # fmt: skip
        width = len(column.inputs)
        places = self._constant(f"{column.name}/places", self.types.INT64, [1, width], list(range(width)))
        equal = self._node("Equal", [index, places], f"{column.name}/equal")
        return [self._node("Cast", [equal], f"{column.name}/inputs", to=self.types.FLOAT)]

    def _number(self, column: TableColumn) -> list[str]:
        name, source = column.name, column.name
        if column.kind == "ordinal":
            keys = _spellings(column.categories or ())
            ranks = self._node("LabelEncoder", [name], f"{name}/rank", domain="ai.onnx.ml", keys_strings=list(keys),
                               values_floats=[float(rank) for rank in keys.values()],
                               default_float=math.nan)  # fmt: skip
            source = self._node("Cast", [ranks], f"{name}/double", to=self.types.DOUBLE)
        missing = self._node("IsNaN", [source], f"{name}/missing")
        mean, std = column.mean or 0.0, column.std or 1.0
        by_mean = column.missing == "mean" or column.scale != "none"
        fill = float(column.fill) if column.fill is not None else (mean if by_mean else 0.0)
        value = source
        if column.missing != "refuse":
            value = self._node("Where", [missing, self._double(f"{name}/fill", fill), source], f"{name}/filled")
        if column.scale == "pooled":
            shifted = self._node("Sub", [value, self._double(f"{name}/mean", mean)], f"{name}/shifted")
            value = self._node("Div", [shifted, self._double(f"{name}/std", std)], f"{name}/scaled")
        encoded = [self._node("Cast", [value], f"{name}/inputs", to=self.types.FLOAT)]
        if column.missing == "indicator":
            encoded.append(self._node("Cast", [missing], f"{name}/indicator", to=self.types.FLOAT))
        return encoded

    def _double(self, name: str, value: float) -> str:
        return self._constant(name, self.types.DOUBLE, [1], [value])

    def _constant(self, name: str, kind: int, shape: list[int], values: list[Any]) -> str:
        self.constants.append(self.helper.make_tensor(name, kind, shape, values))
        return name

    def _node(self, operator: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self.nodes.append(self.helper.make_node(operator, inputs, [output], **attributes))
        return output


def _spellings(categories: tuple[str, ...]) -> dict[str, int]:
    """Return the position of each category, also of integers with ``.0``, as `category_text` reads them."""
    places = {text: place for place, text in enumerate(categories)}
    also = {f"{text}.0": place for text, place in places.items() if _INDEX.fullmatch(text)}
    return {**also, **places}
