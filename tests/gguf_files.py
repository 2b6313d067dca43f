"""GGUF files for tests, written with the `gguf` package's own quantizer."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np


def requantize(source: Path, target: Path, kind: str) -> Path:
    """Dequantize `source` to float32 and write it again with every matrix (the embedding included) as `kind`.

    Vectors (norms) stay float32.
    """
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    quantized = gguf.GGMLQuantizationType[kind]
    for tensor in reader.tensors:
        shape = [int(n) for n in reversed(tensor.shape)]
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(shape)
        if values.ndim > 1:
            writer.add_tensor(tensor.name, gguf.quantize(values, quantized), raw_dtype=quantized)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
