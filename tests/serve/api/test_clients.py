"""Real clients against a real server: the openai SDK, lm-evaluation-harness and langchain."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.serve.serving import Served, served, wide_llama
from tests.serve.tiny_models import byte_level, save
from tests.stuck import STUCK

IDS = [262, 223, 290, 40]
TEXT = "hello wörld 日本"
MESSAGES: Any = [{"role": "user", "content": "hello"}]
MODEL = "tiny"
KEY = "k"

pytestmark = pytest.mark.filterwarnings("default")  # warnings inside the clients are not ours


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(api_key=KEY) as found:
        yield found


def client(at: Served) -> Any:
    openai = pytest.importorskip("openai", reason="needs the 'clients' extra")
    return openai.OpenAI(base_url=f"{at.url}/v1", api_key=KEY, max_retries=0)


def test_openai_completions(server: Served) -> None:
    with client(server) as sdk:
        assert [m.id for m in sdk.models.list()] == [MODEL]
        reply = sdk.completions.create(model=MODEL, prompt=IDS, max_tokens=0, echo=True, logprobs=2)
        truth = server.truth(IDS)
        scores = reply.choices[0].logprobs.token_logprobs
        assert scores[0] is None
        want = [float(truth[i - 1, IDS[i]]) for i in range(1, len(IDS))]
        assert scores[1:] == pytest.approx(want, abs=1e-5)
        extra = {"prompt_logprobs": 1, "return_token_ids": True}
        body = {"model": MODEL, "prompt": TEXT, "max_tokens": 5, "seed": 3, "logprobs": 1, "extra_body": extra}
        whole = sdk.completions.create(**body)
        assert len(whole.choices[0].prompt_logprobs) == len(whole.choices[0].prompt_token_ids)
        chunks = list(sdk.completions.create(**body, stream=True, stream_options={"include_usage": True}))
        assert "".join(c.choices[0].text for c in chunks[:-1]) == whole.choices[0].text
        offsets = [o for c in chunks[:-1] for o in c.choices[0].logprobs.text_offset]
        assert offsets == whole.choices[0].logprobs.text_offset and offsets[0] == len(TEXT)
        assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_openai_chat(server: Served) -> None:
    with client(server) as sdk:
        body: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 6, "seed": 1}
        body |= {"logprobs": True, "top_logprobs": 3}
        whole = sdk.chat.completions.create(**body).choices[0]
        data = b"".join(bytes(e.bytes) for e in whole.logprobs.content)
        assert data.decode("utf-8", "replace").startswith(whole.message.content)
        chunks = list(sdk.chat.completions.create(**body, stream=True))
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.message.content
        entries = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
        assert [e.token for e in entries] == [e.token for e in whole.logprobs.content]
        assert [e.logprob for e in entries] == pytest.approx([e.logprob for e in whole.logprobs.content], abs=1e-5)


def test_openai_errors(server: Served) -> None:
    import openai

    with client(server) as sdk:
        with pytest.raises(openai.BadRequestError) as error:
            sdk.completions.create(model=MODEL, prompt="a", logprobs=21)
        assert error.value.param == "logprobs" and error.value.type == "invalid_request_error"
        with pytest.raises(openai.NotFoundError):
            sdk.completions.create(model="other", prompt="a")
    wrong = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with wrong as other, pytest.raises(openai.AuthenticationError):
        other.models.list()


def test_openai_async(server: Served) -> None:
    openai = pytest.importorskip("openai", reason="needs the 'clients' extra")

    async def many() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as sdk:
            asks = [
                sdk.completions.create(
                    model=MODEL, prompt=[5 + i, *IDS], max_tokens=1, logprobs=0, echo=True, temperature=0
                )
                for i in range(12)
            ]
            streamed = await sdk.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=3, stream=True)
            chunks = [chunk async for chunk in streamed]
            assert chunks[-1].choices[0].finish_reason in ("length", "stop")
            return list(await asyncio.gather(*asks))

    for i, reply in enumerate(asyncio.run(many())):
        truth = server.truth([5 + i, *IDS])
        want = [float(truth[at, token]) for at, token in enumerate(IDS)]
        assert reply.choices[0].logprobs.token_logprobs[1:-1] == pytest.approx(want, abs=1e-5)


def test_langchain(server: Served) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="needs the 'clients' extra")
    common = {"model": MODEL, "base_url": f"{server.url}/v1", "api_key": KEY, "max_retries": 0, "seed": 5}
    chat = langchain.ChatOpenAI(**common, max_tokens=5, logprobs=True, top_logprobs=2)
    reply = chat.invoke("hello")
    assert reply.content == server_text(server, max_tokens=5, seed=5)
    assert len(reply.response_metadata["logprobs"]["content"]) == reply.usage_metadata["output_tokens"]
    streamed = list(chat.stream("hello"))
    assert "".join(str(part.content) for part in streamed) == reply.content
    completion = langchain.OpenAI(**common, max_tokens=4, n=2, best_of=1)
    assert len(completion.generate(["hello", "wörld"]).generations) == 2


def server_text(at: Served, **fields: Any) -> str:
    with client(at) as sdk:
        reply = sdk.chat.completions.create(model=MODEL, messages=MESSAGES, **fields)
        return str(reply.choices[0].message.content)


TASKS = {
    "choices": """
task: choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/choices.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{options}}}}"
doc_to_target: 0
target_delimiter: ""
""",
    "rolling": """
task: rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/rolling.jsonl}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: word_perplexity}}]
""",
}
WORDS = ["hello", "world", "the", "quick", "brown", "fox", "user", "says", "hi", "assistant", "there"]


def write_tasks(folder: Path, at: Served) -> None:
    """52 multiple-choice documents, a third of which have a greedy choice, and 12 rolling ones of several windows."""
    chooser = random.Random(0)
    tokenizer = at.tokenizer
    with (folder / "choices.jsonl").open("w") as file:
        for _ in range(52):
            context = " ".join(chooser.choices(WORDS, k=chooser.randrange(3, 12)))
            options = [" " + " ".join(chooser.choices(WORDS, k=n)) for n in (1, 2, 3)]
            ids = tokenizer.encode(context, add_special_tokens=False)
            likeliest = tokenizer.decode([int(at.truth(ids)[-1].argmax())])
            if likeliest.isascii() and likeliest.strip():
                options.append(likeliest)
            file.write(json.dumps({"context": context, "options": options}) + "\n")
    with (folder / "rolling.jsonl").open("w") as file:
        for _ in range(12):
            text = " ".join(chooser.choices([*WORDS, "wörld", "日本"], k=chooser.randrange(20, 90)))
            file.write(json.dumps({"text": text}) + "\n")
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(text.format(folder=folder))


def harness(folder: Path, runs: dict[str, tuple[str, str]]) -> list[dict[tuple[str, int], Any]]:
    """Runs lm-eval by name with (model, arguments), all in one process; their responses by (task, document)."""
    lines = []
    for name, (model, arguments) in runs.items():
        line = ["lm_eval", "run", "--model", model, "--model_args", arguments, "--device", "cpu", "--batch_size", "4"]
        line += ["--tasks", "choices,rolling", "--include_path", str(folder), "--output_path", str(folder / name)]
        lines.append([*line, "--log_samples"])
    code = "import sys; from lm_eval.__main__ import cli_evaluate\nfor sys.argv in eval(sys.argv[1]): cli_evaluate()"
    environment = {**os.environ, "OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub")}
    command = [sys.executable, "-c", code, repr(lines)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=STUCK)
    assert done.returncode == 0, done.stderr[-3000:]
    return [samples(folder / name) for name in runs]


def samples(folder: Path) -> dict[tuple[str, int], Any]:
    """What lm-eval wrote into a folder."""
    found: dict[tuple[str, int], Any] = {}
    for path in folder.rglob("samples_*.jsonl"):
        task = path.name.split("_")[1]
        for line in path.read_text().splitlines():
            sample = json.loads(line)
            found[task, sample["doc_id"]] = [answer[0] for answer in sample["resps"]]
    return found


def test_lm_eval_local_completions(server: Served, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="needs the 'clients' extra")
    checkpoint = save(wide_llama(), tmp_path / "model", byte_level())
    write_tasks(tmp_path, server)
    url = f"{server.url}/v1/completions"
    served = f"model={MODEL},base_url={url},tokenizer={checkpoint},num_concurrent=4,max_length=66,max_retries=1"
    runs = {
        "ours": ("local-completions", served),
        "theirs": ("hf", f"pretrained={checkpoint},dtype=float32,max_length=64"),
    }
    ours, theirs = harness(tmp_path, runs)
    assert sorted(ours) == sorted(theirs) and len(ours) == 64
    greedy, worst = [], 0.0
    for key, want in theirs.items():
        for ours_one, theirs_one in zip(ours[key], want, strict=True):
            if key[0] == "rolling":
                worst = max(worst, abs(number(ours_one) - number(theirs_one)))
                continue
            worst = max(worst, abs(number(ours_one[0]) - number(theirs_one[0])))
            assert str(ours_one[1]) == str(theirs_one[1]), key
            greedy.append(str(ours_one[1]) == "True")
    assert worst < 1e-3
    assert any(greedy) and not all(greedy)


def number(value: Any) -> float:
    return float(value[0] if isinstance(value, list) else value)


def test_lm_eval_s_remote_tokenizer(server: Served) -> None:
    utils = pytest.importorskip("lm_eval.utils", reason="needs the 'clients' extra")
    tokenizer = utils.RemoteTokenizer(server.url, auth_token=KEY)
    assert tokenizer.eos_token_id == 2 and tokenizer.bos_token_id == 0
    ids = tokenizer.encode(TEXT)
    assert ids == server.tokenizer.encode(TEXT, add_special_tokens=False) and tokenizer.decode(ids) == TEXT
    assert tokenizer.apply_chat_template(MESSAGES).startswith("<|im_start|>user")
    assert torch.equal(torch.tensor(ids), torch.tensor(tokenizer(TEXT)["input_ids"]))
    tokenizer.session.close()
