"""The published sweep: `make reports` measures again and writes reports/sweep; `--render` only writes it anew.

Six candidates against the demo model: bf16 and int8, which are conversions on load, an nf4 checkpoint made by
bitsandbytes, and GGUF files in Q8_0, Q4_0 and Q2_K. Those four are made from the demo model's own dequantized weights
and kept in the cache folder. The GGUF blocks are quantized by llama.cpp's own code, from the `xllamacpp` wheel.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import evalgate
from evalgate.cli.progress import observer
from evalgate.paths import cache_path
from evalgate.reports import leaderboard_csv, leaderboard_html, leaderboard_json, leaderboard_markdown, leaderboard_svg
from evalgate.reports._pareto_png import png
from evalgate.store.sweeps import DOCUMENT

if TYPE_CHECKING:
    from evalgate.leaderboard import Leaderboard

FOLDER = Path(__file__).parent / "sweep"
WORK = "published-sweep"  # in the cache folder: the runs, so that an interrupted sweep goes on
WINDOWS, CONTEXT = 27, 128  # three documents a domain
GGUF_TYPES = ("Q8_0", "Q4_0", "Q2_K")
HEAD = "Q8_0"  # of the embedding, which is the output head too: llama.cpp takes Q6_K, and this where rows do not fit it
FALLBACK = "IQ4_NL"  # what llama.cpp takes where a row is not whole blocks of the type asked for
PAGE = "README.md"


def main() -> None:
    """Measure the sweep, or with --render read it back, then write the files of reports/sweep."""
    parser = argparse.ArgumentParser(
        description="Measure six candidates of the demo and publish them in reports/sweep."
    )
    parser.add_argument("--render", action="store_true", help="measure nothing: write from the stored document")
    parser.add_argument("--limit", type=int, default=WINDOWS, help=f"windows; {WINDOWS} are published")
    parser.add_argument("--out", type=Path, default=FOLDER, help="another folder than reports/sweep")
    options = parser.parse_args()
    board = _published(options.out) if options.render else measure(options.limit)
    options.out.mkdir(parents=True, exist_ok=True)
    texts = {
        DOCUMENT: leaderboard_json.render(board),
        "sweep.csv": leaderboard_csv.render(board),
        "sweep.html": leaderboard_html.render(board),
        "sweep.svg": leaderboard_svg.render(board),
        PAGE: page(board),
    }
    for name, text in texts.items():
        (options.out / name).write_text(text, encoding="utf-8")
        sys.stderr.write(f"wrote {options.out / name}\n")
    picture = png(board)
    if picture is not None:
        (options.out / "sweep.png").write_bytes(picture)
        sys.stderr.write(f"wrote {options.out / 'sweep.png'}\n")


def measure(limit: int) -> Leaderboard:
    """The sweep, measured now; what an interrupted one has measured is taken over."""
    candidates = {"bf16": "demo@bf16", "int8": "demo@int8", "nf4": str(nf4())}
    candidates |= {kind: str(gguf_file(kind)) for kind in GGUF_TYPES}
    out = cache_path() / WORK / f"{limit}x{CONTEXT}"
    found = evalgate.sweep(
        "demo", candidates, limit=limit, context=CONTEXT, out=out, observer=observer(sys.stderr, noun="KL")
    )
    return _named_as_made(found.board)


def _named_as_made(board: Leaderboard) -> Leaderboard:
    """The document without the paths of this machine: a made candidate is called as it was made."""
    entries = [
        entry.model_copy(
            update={
                "spec": spec,
                "run": None,
                "source": None
                if entry.source is None
                else entry.source.model_copy(update={"spec": spec, "name": spec}),
            }
        )
        for entry in board.entries
        for spec in [entry.spec if entry.spec.startswith("demo") else f"demo as {entry.name}"]
    ]
    paths = {old.spec: new.spec for old, new in zip(board.entries, entries, strict=True)}
    notes = []
    for note in board.notes:
        for path, name in paths.items():
            note = note.replace(path, name)
        notes.append(note)
    return board.model_copy(update={"entries": entries, "notes": notes})


def _published(folder: Path) -> Leaderboard:
    from evalgate.store.sweeps import read_sweep

    return read_sweep(folder)


def page(board: Leaderboard) -> str:
    """The front page of reports/sweep: the Markdown for a model card, and how its candidates were made."""
    versions = ", ".join(f"{name} {version}" for name, version in sorted(board.versions.items()))
    lines = [
        "# The sweep",
        "",
        f"Made by `make reports` (reports/make_sweep.py), {board.created}, on a CPU. What follows up to the last "
        "section is the Markdown that `evalgate sweep` writes for a model card.",
        "",
        leaderboard_markdown.render(board).rstrip("\n"),
        "",
        "## How the candidates were made",
        "",
        "All of them are made from the demo model (Gemma 3 270M, Q4_K_M) dequantized to float32, which is the "
        "reference too: the figures are about quantizing once more, and not about the 4 bits that it has already.",
        "",
        "- `bf16` and `int8`: `demo@bf16` and `demo@int8`, converted on load",
        "- `nf4`: a checkpoint by bitsandbytes, 4-bit NF4 with blocks of 64, embedding and norms in bfloat16",
        "- `Q8_0`, `Q4_0`, `Q2_K`: every matrix in that type, by llama.cpp's quantizer. Rows that are not whole "
        f"blocks of Q2_K, as most of this small model's, are in {FALLBACK}, as llama.cpp has it. The embedding is in "
        f"{HEAD}",
        "",
        f"- [{DOCUMENT}]({DOCUMENT}), [sweep.csv](sweep.csv): every figure",
        "- [sweep.html](sweep.html): the page, [sweep.svg](sweep.svg) and [sweep.png](sweep.png): the plot",
        "",
        f"Versions: {versions}.",
    ]
    return "\n".join(lines) + "\n"


def nf4() -> Path:
    """The demo model as a bitsandbytes checkpoint in the cache folder, made where it is not there yet."""

    def build(folder: Path) -> bool:
        import torch
        from transformers import AutoModelForCausalLM, BitsAndBytesConfig

        from serve.models.demo import demo_path
        from serve.models.gguf import load_gguf

        model, tokenizer, _ = load_gguf(demo_path(), device="cpu")
        plain = folder.parent / "plain"
        model.save_pretrained(plain)
        how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
        packed = AutoModelForCausalLM.from_pretrained(plain, quantization_config=how, dtype=torch.bfloat16)
        packed.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        shutil.rmtree(plain)
        return True

    return _made("nf4-2", build)


def gguf_file(kind: str) -> Path:
    """The demo model with every matrix in one GGUF type, in the cache folder, made where it is not there yet."""
    name = f"gemma-3-270m-{kind}.gguf"

    def build(folder: Path) -> bool:
        from serve.models.demo import demo_path

        requantize(demo_path(), folder / name, kind)
        return True

    return _made(f"{kind}-1", build) / name


def _made(name: str, build: Callable[[Path], bool]) -> Path:
    from serve.models import cache
    from serve.models.demo import demo_path

    entry = f"sweep/{demo_path().parent.name[:16]}-{name}"
    with cache.lock(entry):
        folder = cache.verified(entry)
        if folder is None:
            sys.stderr.write(f"making {name.rpartition('-')[0]}\n")
            folder = cache.publish(entry, build)
    if folder is None:
        raise SystemExit(f"{name} could not be made")
    return folder


def requantize(source: Path, target: Path, kind: str) -> None:
    """Write a GGUF file with every matrix of another one as `kind`; vectors stay as they are."""
    import gguf
    import numpy as np

    from serve.models.conversions._blocks import packed

    class PlainReader(gguf.GGUFReader):  # type: ignore[misc]  # its memmap makes a view of every vocabulary entry
        @property
        def data(self) -> Any:
            return self._plain

        @data.setter
        def data(self, mapped: Any) -> None:
            self._plain = np.asarray(mapped)

    reader = PlainReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        shape = [int(n) for n in reversed(tensor.shape)]
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(shape)
        if values.ndim < 2:
            writer.add_tensor(tensor.name, values)
            continue
        chosen = type_of(tensor.name, shape[-1], kind)
        if chosen == "F16":
            writer.add_tensor(tensor.name, values.astype(np.float16))
            continue
        blocks = packed(values, chosen)
        writer.add_tensor(tensor.name, blocks, raw_dtype=gguf.GGMLQuantizationType[chosen])
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()


def type_of(name: str, columns: int, kind: str) -> str:
    """The type of one matrix, as llama.cpp chooses where rows of `columns` do not fit or the output head is tied."""
    import gguf

    for chosen in (HEAD if name == "token_embd.weight" else kind, FALLBACK):
        block, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[chosen]]
        if columns % block == 0:
            return chosen
    return "F16"


if __name__ == "__main__":
    main()
