"""ONNX models of the writer, read with the onnx package and run with onnxruntime."""

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import numpy_helper

from casemate.runtime import onnx_model
from casemate.runtime.onnx_model import FLOAT


def written(nodes, constants=()):
    shape = onnx_model.value_info("x", FLOAT, ["n", 3]), onnx_model.value_info("y", FLOAT, ["n", 3])
    return onnx_model.model(nodes, constants, shape[:1], shape[1:], opset=20)


def test_model_equals_that_of_the_onnx_package():
    weight = np.arange(9, dtype=np.float32).reshape(3, 3)
    nodes = [
        onnx_model.node("MatMul", ["x", "w"], ["h"]),
        onnx_model.node("Transpose", ["h"], ["t"], perm=[1, 0]),
        onnx_model.node("Transpose", ["t"], ["u"], perm=[1, 0]),
        onnx_model.node("LpNormalization", ["u"], ["v"], axis=-1, p=2),
        onnx_model.node("Elu", ["v"], ["y"], alpha=0.5),
    ]
    written_nodes = onnx.load_from_string(written(nodes, [onnx_model.tensor("w", weight)]))
    onnx.checker.check_model(written_nodes, full_check=True)
    helper = onnx.helper
    info = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", 3]) for name in "xy"]
    expected_nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Transpose", ["h"], ["t"], perm=[1, 0]),
        helper.make_node("Transpose", ["t"], ["u"], perm=[1, 0]),
        helper.make_node("LpNormalization", ["u"], ["v"], axis=-1, p=2),
        helper.make_node("Elu", ["v"], ["y"], alpha=0.5),
    ]
    graph = helper.make_graph(expected_nodes, "graph", info[:1], info[1:], [numpy_helper.from_array(weight, "w")])
    expected = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    expected.ir_version = 10
    assert written_nodes == expected


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5), st.sampled_from([(-1,), (1, -1), (-1, 1, 1)]))
def test_integer_constants_round_trip(values, shape):
    value = np.array(values, np.int64).reshape(shape) if values else np.empty((0,), np.int64)
    parsed = onnx.TensorProto.FromString(onnx_model.tensor("c", value))
    assert parsed.name == "c"
    assert np.array_equal(numpy_helper.to_array(parsed), value)


def test_rejects_other_element_types():
    with pytest.raises(KeyError):
        onnx_model.tensor("c", np.zeros(2))


def test_onnxruntime_runs_the_model():
    model = written([onnx_model.node("Add", ["x", "b"], ["y"])], [onnx_model.tensor("b", np.ones(3, np.float32))])
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    assert session.run(None, {"x": np.zeros((2, 3), np.float32)})[0].tolist() == [[1, 1, 1]] * 2
