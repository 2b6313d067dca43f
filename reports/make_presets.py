"""`make presets`: the runs that the policy presets rest on, measured again; their summaries go to reports/presets.

The demo model against its bfloat16 and int8 copies, and against its own float32 weights quantized once more to Q8_0 and
Q4_0 (linear layers; norms and the embedding stay as they are) with the gguf package's quantizer. Offline.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np

import evalgate
from evalgate.cli.progress import observer
from evalgate.reports import json, terminal
from serve.models.demo import demo_path

FOLDER = Path(__file__).parent / "presets"
WINDOWS = 16
QUANTIZED = {"demo-q8_0.gguf": gguf.GGMLQuantizationType.Q8_0, "demo-q4_0.gguf": gguf.GGMLQuantizationType.Q4_0}
KEPT = "token_embd.weight"  # also the output head


def main() -> None:
    """Quantize, measure, write summary.json and block.txt."""
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        for name, kind in QUANTIZED.items():
            requantize(demo_path(), Path(name), kind)
        run = evalgate.compare(
            "demo",
            ["demo@bf16", "demo@int8", *QUANTIZED],
            limit=WINDOWS,
            observer=observer(sys.stderr, noun="KL"),
        )
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "summary.json").write_text(json.render(run.summary), encoding="utf-8")
    (FOLDER / "block.txt").write_text(terminal.render(run.summary), encoding="utf-8")


def requantize(source: Path, target: Path, kind: gguf.GGMLQuantizationType) -> None:
    """Write `source` again with every matrix but the embedding dequantized and quantized to `kind`."""
    reader = PlainReader(source)
    writer = gguf.GGUFWriter(target, arch=str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        if len(tensor.shape) < 2 or tensor.name == KEPT:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        else:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
            writer.add_tensor(tensor.name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class PlainReader(gguf.GGUFReader):
    """A reader over a plain array: slicing a memory map once per vocabulary entry takes most of a load's time."""

    @property
    def data(self) -> np.ndarray:
        """The file's bytes."""
        return self._plain

    @data.setter
    def data(self, mapped: np.ndarray) -> None:
        self._plain = np.asarray(mapped)


if __name__ == "__main__":
    main()
