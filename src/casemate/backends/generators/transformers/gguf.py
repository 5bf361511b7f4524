"""Models in GGUF files, the format of llama.cpp: converted once to a folder that transformers reads.

The folder is in the cache, under the file's SHA-256, so a changed file is converted again. Quantized weights are
unpacked: the folder takes two bytes per parameter.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
import struct
import tempfile
from pathlib import Path
from typing import Any

from casemate.errors import BackendError, DataError, needs
from casemate.runtime.files import cache_folder
from casemate.runtime.hugging_face import silent

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
HEADER = struct.Struct("<4sIQQ")  # magic, version, tensors, metadata entries
MOST_ENTRIES = 1_000_000  # more tensors or metadata entries than any model has: the header is damaged
FORMAT = "1"  # version of this conversion; part of the folder's name
UNREADABLE = (OSError, ValueError, KeyError, IndexError, TypeError, OverflowError, RuntimeError, NotImplementedError)


def converted(file: Path, sha256: str = "", cache: Path | None = None) -> Path:
    """Returns the folder with the converted model; converts it first unless it is in ``cache`` (see ``CausalLM``).

    Raises:
        DataError: If the file is missing, truncated, not GGUF, of an unsupported architecture, one of several parts, or
            without a chat template; or if its digest differs from ``sha256``.
        BackendError: If the cache cannot be written.
    """
    digest = _checked_digest(file, sha256)
    folder = (cache or cache_folder() / "models") / f"{file.stem}-{digest[:16]}-{FORMAT}"
    if (folder / "config.json").exists():  # complete: the folder appears by one rename
        return folder
    with needs("casemate[transformers]"):
        gguf: Any = importlib.import_module("gguf")
    dtype = _inspect(gguf, file)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}."))
    except OSError as error:
        raise _no_room(folder, error) from error
    try:
        _convert(file, temporary, dtype)
        if not (folder / "config.json").exists():  # another process may have finished first
            os.replace(temporary, folder)
    except OSError as error:
        if not (folder / "config.json").exists():
            raise _no_room(folder, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _checked_digest(file: Path, sha256: str) -> str:
    """SHA-256 of a file whose header is that of a GGUF file."""
    try:
        with file.open("rb") as data:
            header = data.read(HEADER.size)
            _check_header(file, header)
            data.seek(0)
            digest = hashlib.file_digest(data, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}); correct the path of the model") from error
    if sha256 and digest != sha256.lower():
        raise DataError(f"{file} has SHA-256 {digest}, expected {sha256}; get the model again, or correct 'sha256'")
    return digest


def _check_header(file: Path, header: bytes) -> None:
    if header[:4] != MAGIC:
        raise DataError(f"{file} is not a GGUF file: it does not begin with 'GGUF'; set a GGUF file or a model folder")
    if len(header) < HEADER.size:
        raise DataError(f"{file} is truncated: it has {len(header)} bytes; get the model again")
    _, version, tensors, entries = HEADER.unpack(header)
    if version not in VERSIONS or max(tensors, entries) > MOST_ENTRIES:
        raise DataError(
            f"{file} has GGUF version {version}, {tensors} tensors and {entries} metadata entries; it is damaged, "
            f"big-endian, or of an unknown version (known: {', '.join(map(str, VERSIONS))}); get the model again"
        )


def _inspect(gguf: Any, file: Path) -> str:
    """Checks that the file is whole, a chat model and not one of several parts; returns the dtype of the conversion."""
    try:
        reader = gguf.GGUFReader(str(file))
        fields = reader.fields
        types = {tensor.tensor_type.name for tensor in reader.tensors}
        parts = int(fields["split.count"].contents()) if "split.count" in fields else 1
        template = fields["tokenizer.chat_template"].contents() if "tokenizer.chat_template" in fields else ""
    except UNREADABLE as error:
        raise DataError(
            f"{file} is truncated or damaged ({type(error).__name__} while its tensors were read); get the model again"
        ) from error
    if parts > 1:
        raise DataError(f"{file} is one of {parts} parts of a model; merge them with 'llama-gguf-split --merge'")
    if not types:
        raise DataError(f"{file} has no tensors; set the file of a model, not of a tokenizer")
    if not isinstance(template, str) or not template.strip():
        raise DataError(
            f"{file} has no chat template, so its model is not trained to answer; use an 'instruct' or 'chat' version"
        )
    if types == {"F32"}:
        return "float32"
    return "float16" if types <= {"F16", "F32"} else "bfloat16"


def _convert(file: Path, folder: Path, dtype: str) -> None:
    import torch
    from safetensors import SafetensorError

    transformers: Any = importlib.import_module("transformers")
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    unpacked = getattr(transformers, "GgufConfig", None)  # older versions always unpack
    more = {"quantization_config": unpacked(dequantize=True)} if unpacked else {}
    try:
        with silent(warnings=False):
            tokenizer = transformers.AutoTokenizer.from_pretrained(**source, local_files_only=True)
            model = transformers.AutoModelForCausalLM.from_pretrained(
                **source, **more, dtype=torch.float32, local_files_only=True
            )
    except (*UNREADABLE, ImportError, AttributeError, AssertionError) as error:
        raise DataError(
            f"{file} cannot be converted ({type(error).__name__}); transformers may not support its architecture in "
            "GGUF: set a folder in the layout of Hugging Face instead"
        ) from error
    model = model.to(getattr(torch, dtype))
    model.hf_quantizer = model.quantization_method = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    try:
        with silent(warnings=False):
            tokenizer.save_pretrained(folder)
            model.save_pretrained(folder)
    except SafetensorError as error:
        raise OSError(str(error)) from error


def _no_room(folder: Path, error: OSError) -> BackendError:
    problem = f"the converted model cannot be written to {folder.parent} ({error.strerror or type(error).__name__})"
    remedy = "free two bytes per parameter there, or set another folder by 'cache' or XDG_CACHE_HOME"
    return BackendError(f"{problem}; {remedy}", backend="transformers", retryable=True)
