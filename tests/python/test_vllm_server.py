"""vLLM's OpenAI server with deplo's plugin, by plain HTTP: completions, chats, streams, many at once and prefixes from the cache, beside vLLM's eager
mode, whose server gets the same requests."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from engines import needs_core
from test_vllm import TINY, has_vllm

pytestmark = [needs_core, pytest.mark.skipif(not has_vllm(), reason="vLLM is not installed here: make vllm"), pytest.mark.timeout(900)]

CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
LONG = "What a server has read once it need not read again. " * 3  # several blocks of the cache


def make_model(folder: Path) -> None:
    """A config of Qwen3 and a tokenizer of bytes, made here."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: k for k, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "chat_template": CHAT, "model_max_length": 512}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 257, "eos_token_id": 256, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps({**config, **TINY, "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "max_position_embeddings": 512}))


class Server:
    """A server of the model in `folder`, until `end`."""

    def __init__(self, folder: Path, home: Path, *arguments: str, **variables: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = home / "log"
        settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_CACHE_ROOT": str(home / "cache"), "VLLM_NO_USAGE_STATS": "1"}
        cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:2])
        settings |= {"VLLM_CPU_OMP_THREADS_BIND": cores, "DEPLO_TIME": "1"}  # so that the log tells what deplo compiles
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name", "tiny"]
        command += ["--load-format", "dummy", "--dtype", "float32", "--seed", "0", "--enable-prompt-tokens-details"]
        command += ["--max-model-len", "256", "--max-num-seqs", "8", "--max-num-batched-tokens", "256", "--block-size", "32"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), *arguments]
        with self.log.open("w") as log:
            self._process = subprocess.Popen(command, env={**os.environ, **settings, **variables}, stdout=log, stderr=log, start_new_session=True)
        self._wait()

    def _wait(self) -> None:
        while self._process.poll() is None:
            try:
                if self.get("/health") is not None:
                    return
            except OSError:
                time.sleep(0.5)
        raise AssertionError(self.log.read_text()[-6000:])

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=300) as answer:
            return answer.read().decode()

    def post(self, path: str, **body: object) -> str:
        data = json.dumps({"model": "tiny", **body}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.read().decode()

    def complete(self, prompt: object, count: int, **more: object) -> dict:
        given = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, **more}
        return json.loads(self.post("/v1/completions", prompt=prompt, max_tokens=count, **given))

    def stream(self, path: str, **body: object) -> list[dict]:
        """The parts of an answer, in their order."""
        lines = self.post(path, stream=True, temperature=0, ignore_eos=True, **body).splitlines()
        events = [line.removeprefix("data: ") for line in lines if line]
        assert events[-1] == "[DONE]"
        return [json.loads(event)["choices"][0] for event in events[:-1]]

    def end(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def tokens(answer: dict) -> list[list[int]]:
    return [choice["token_ids"] for choice in answer["choices"]]


def cached(answer: dict) -> int:
    """How many tokens of the prompt came from the cache."""
    return (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def asked(server: Server) -> dict[str, object]:
    """What the server answers to requests of every kind."""
    found: dict[str, object] = {}
    words: dict[str, tuple[object, int]] = {"single": ("A", 9), "short": ("Good morning", 20), "tokens": ([7, 8, 9] * 30, 16)}
    words |= {"long": (LONG + "Once", 24), "continued": (LONG + "Twice", 12)}
    answers = {name: server.complete(*request) for name, request in words.items()}
    found |= {name: tokens(answer) for name, answer in answers.items()}
    assert cached(answers["short"]) == 0 and cached(answers["continued"]) >= 128  # what `long` had read
    found["text"] = answers["short"]["choices"][0]["text"]

    with ThreadPoolExecutor(8) as pool:  # batches that grow and shrink
        futures = {name: pool.submit(server.complete, *words[name]) for name in words}
        for name, future in futures.items():
            found[f"{name}, at once"] = tokens(future.result())
    found["several"] = tokens(server.complete(["one", "and another one", "a third"], 10))
    found["sampled"] = tokens(server.complete("Dice:", 24, temperature=0.9, top_p=0.95, seed=5, n=2))

    parts = server.stream("/v1/completions", prompt="Good morning", max_tokens=20)
    assert len(parts) > 2
    found["stream"] = "".join(part["text"] for part in parts)
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who are you?"}]
    body = {"messages": talk, "max_tokens": 20}
    chat = json.loads(server.post("/v1/chat/completions", temperature=0, ignore_eos=True, **body))
    found["chat"] = chat["choices"][0]["message"]["content"]
    found["chat, stream"] = "".join(part["delta"].get("content") or "" for part in server.stream("/v1/chat/completions", **body))

    with pytest.raises(urllib.error.HTTPError) as refused:
        server.complete("a" * 300, 4)
    found["refused"] = refused.value.code
    return found


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    make_model(folder)
    return folder


def answers_of(folder: Path, home: Path, *arguments: str, **variables: str) -> tuple[dict[str, object], str]:
    home.mkdir()
    server = Server(folder, home, *arguments, **variables)
    try:
        return asked(server), server.log.read_text()
    finally:
        server.end()


def test_server_answers_as_eager_mode_does(model_folder, tmp_path):
    expected, said = answers_of(model_folder, tmp_path / "eager", "--enforce-eager")
    assert "kernel/lower" not in said
    answers, said = answers_of(model_folder, tmp_path / "deplo", "--compilation-config", '{"backend": "deplo"}')
    assert "kernel/lower" in said
    assert answers == expected
    for name in ("single", "short", "long", "continued", "tokens"):
        assert answers[f"{name}, at once"] == answers[name]
    assert answers["stream"] == answers["text"] and answers["chat, stream"] == answers["chat"] and answers["refused"] == 400
