"""An exact fp32 IR for OpenVINO: the graph that GenAI builds from a GGUF file, with the fp32 weights put in.

GenAI reads no fp32 GGUF, but saves the graph that it makes of an fp16 one. Every fp16 constant of that graph is replaced by
the fp32 tensor that it was rounded from, and each replacement must round to the constant it replaces, so a tensor that
went elsewhere, or in another order, is an error and not another model.

    python -m server.bench.offline.convert_openvino save F16_GGUF      in the environment of OpenVINO; writes beside the file
    python -m server.bench.offline.convert_openvino raise HF_FOLDER SAVED_FOLDER OUT
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from server.bench.offline.drive_ctranslate2 import read_safetensors

GRAPH = "openvino_model.xml"


def save(gguf: Path) -> None:
    genai: Any = importlib.import_module("openvino_genai")
    genai.LLMPipeline(str(gguf), "CPU", enable_save_ov_model=True)
    if not gguf.with_name(GRAPH).exists():
        raise RuntimeError(f"OpenVINO GenAI did not save the graph that it made of {gguf}")
    os._exit(0)  # its own end can crash, after everything was written


def exact(hf: Path, saved: Path, out: Path) -> None:
    np: Any = importlib.import_module("numpy")
    openvino: Any = importlib.import_module("openvino")
    opset: Any = importlib.import_module("openvino.opset13")
    config = json.loads((hf / "config.json").read_text(encoding="utf-8"))
    tensors = read_safetensors(hf / "model.safetensors", np)
    by_rounding = {value.astype(np.float16).tobytes(): value for value in tensors.values() if value.ndim == 1}
    model = openvino.Core().read_model(str(saved / GRAPH))
    used = set()
    for constant in _halves(model, openvino):
        half = constant.data
        name = constant.get_friendly_name().replace("[", ".").replace("]", "")
        value = tensors.get(name, by_rounding.get(half.tobytes()))
        if value is not None:
            used.add(value.ctypes.data)
        elif half.size == 1 and np.float16(config["rms_norm_eps"]) == half.reshape(-1)[0]:
            value = np.full(half.shape, config["rms_norm_eps"], np.float32)
        elif half.size <= 64:
            value = half.astype(np.float32)  # a scale or a small table: a power of two, or made for the graph itself
        else:
            raise ValueError(f"the constant {name} of shape {half.shape} is none of the model's tensors")
        value = value.reshape(half.shape)
        if not np.array_equal(value.astype(np.float16), half):
            raise ValueError(f"the constant {name} does not hold the model's tensor, rounded to fp16")
        for target in constant.output(0).get_target_inputs():
            target.get_node().output(0).replace(opset.constant(value).output(0))
    if len(used) != len(tensors):
        raise ValueError(f"{len(tensors) - len(used)} of {len(tensors)} tensors have no place in the graph")
    out.mkdir(parents=True, exist_ok=True)
    openvino.save_model(model, str(out / GRAPH), compress_to_fp16=False)
    for file in (*saved.glob("openvino_*tokenizer.*"), hf / "config.json"):
        shutil.copy(file, out / file.name)


def _halves(model: Any, openvino: Any) -> Iterator[Any]:
    """Constants stored in fp16 and converted where they are used."""
    for node in list(model.get_ops()):
        if node.get_type_name() == "Constant" and node.get_output_element_type(0) == openvino.Type.f16:
            yield node


def main() -> None:
    if sys.argv[1] == "save":
        save(Path(sys.argv[2]))
    else:
        exact(*(Path(argument) for argument in sys.argv[2:5]))


if __name__ == "__main__":
    main()
