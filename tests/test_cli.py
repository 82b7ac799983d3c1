"""The command line: what goes where, what is refused and how, and runs that go on after an interruption."""

from __future__ import annotations

import json
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from dsv41 import cli
from dsv41.commands import inspect
from dsv41.inference.engine import Engine
from dsv41.inference.requests import Request
from dsv41.tokens.chat import ChatFormat
from tests.fixtures_engine import DEFAULT_OPTIONS, GOLDEN, SMALL_OPTIONS

ROOT = pathlib.Path(__file__).parent.parent
OFFICIAL = ROOT / "configs" / "deepseek-v4.1-flash"
MINI8 = GOLDEN / "mini8" / "fp8"
# The options of the shared engines, so that their compiled steps are used again.
DEFAULT_FLAGS = [
    "--random",
    "--deterministic",
    "--batch",
    str(DEFAULT_OPTIONS.max_batch),
    "--max-length",
    str(DEFAULT_OPTIONS.max_length),
]
SMALL_FLAGS = ["--deterministic", "--batch", str(SMALL_OPTIONS.max_batch), "--chunk", "16"]


pytestmark = pytest.mark.usefixtures("random_engines_made_once")


@pytest.fixture
def run(capsys):
    """Runs a command line; returns exit code, stdout and stderr."""

    def call(*argv: object) -> tuple[int, str, str]:
        code = cli.main([str(arg) for arg in argv])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def assert_refused(result: tuple[int, str, str], message: str) -> None:
    code, out, err = result
    assert (code, out) == (2, "")
    assert re.fullmatch(f"dsv41: error: .*{message}.*\n", err), err


def write_lines(path: pathlib.Path, *lines: object) -> pathlib.Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def read_lines(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---------------------------------------------------------------- the command itself


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from dsv41 import cli\ntry: cli.main(['generate', '--help'])\nexcept SystemExit: pass\n"
        "assert not {'jax', 'numpy', 'tokenizers'} & set(sys.modules), sorted(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--max-new-tokens" in done.stdout


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["nonsense"],
        ["generate"],
        ["generate", "--prompt", "a", "--prompt-file", "b"],
        ["generate", "--prompt", "a", "--chunk", "0"],
    ],
)
def test_wrong_usage(argv, capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(argv)
    assert exit_info.value.code == 2
    assert "usage: dsv41" in capsys.readouterr().err


def test_a_bug_is_not_dressed_as_a_user_error(monkeypatch):
    def broken(_):
        raise ValueError("inside")

    monkeypatch.setattr(inspect, "run", broken)
    with pytest.raises(ValueError, match="inside"):
        cli.main(["inspect"])


# ---------------------------------------------------------------- inspect


def test_inspect_official_json(run):
    code, out, err = run("inspect", OFFICIAL, "--json")
    shown = json.loads(out)
    assert (code, err) == (0, "")
    assert shown["bytes_per_token"]["total"] == 890
    assert shown["bytes_per_token"]["sources"]["2"] == {"main KV": 144, "index key": 34}
    assert shown["bytes_per_token"]["sources"]["20"] == {"main KV": 288, "index key": 68}
    rings = 20 * 128 * (512 + 16) + 128 * 4  # entries of 20 layers, and the positions that they share
    assert shown["request_bytes"]["encoder rings"] == shown["request_bytes"]["decoder rings"] == rings
    assert shown["request_bytes"]["compressor tails"] == 3 * 4096
    assert shown["request_bytes"]["n-gram tail"] == 12
    assert shown["drafter_bytes"] == 3 * 128 * 528 + 128 * 4
    assert shown["prefill_bytes"] // 2**20 == 5
    parts = {name: counts["parameters"] for name, counts in shown["parameters"].items()}
    assert parts["Engram"] == (384_006_168 + 384_016_682) * 256 + 2 * (5 * 5120 * 6144 + 2 * 4 * 5120)
    assert parts["routed experts"] == 40 * 384 * 3 * 5120 * 2304
    assert sum(parts.values()) - parts["DSpark"] - parts["vision"] - parts["Engram"] == pytest.approx(552e9, rel=1e-3)
    assert shown["decoder_start"] == 20
    assert shown["layers"][24] == {
        "layer": 24,
        "stack": "decoder",
        "mode": "Reindex",
        "ratio": 1,
        "kv_source": 20,
        "index_source": 24,
        "candidate_source": 20,
        "engram": False,
        "dspark_tap": False,
    }


def test_inspect_tables(run):
    code, out, _ = run("inspect", OFFICIAL)
    assert code == 0
    assert re.search(r"│ 14 +│ encoder │ +Full │ +2 │ +14 │ +14 │ +– │ +yes │ +│", out)
    assert re.search(r"│ total +│ +│ +│ +890 │", out)
    assert out.count(" Reuse ") == 30


def test_inspect_shows_the_small_configuration_by_default(run):
    code, out, _ = run("inspect", "--json")
    assert code == 0
    assert {row["mode"] for row in json.loads(out)["layers"]} == {"window only", "Full", "Reindex", "Reuse"}


def test_inspect_refuses(run, tmp_path):
    assert_refused(run("inspect", tmp_path / "none"), "No such file or directory: .*none")
    config = json.loads((OFFICIAL / "config.json").read_text())
    config["text_config"]["kv_source_layer_ids"] = [2, 9, 14, 20]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert_refused(run("inspect", path), r"text_config\.kv_source_layer_ids: KV source 9 is no index source")
    path.write_text("{")
    assert_refused(run("inspect", path), "not JSON")


# ---------------------------------------------------------------- generate, one prompt


def test_generate_with_random_weights(run, default_engine, tmp_path):
    prompt = "The capital of France"
    whole = default_engine.generate([Request(prompt=prompt, max_new_tokens=8)])[0]
    code, out, err = run("generate", "--prompt", prompt, "--max-new-tokens", 8, *DEFAULT_FLAGS)
    assert (code, out) == (0, whole.text + "\n")  # text alone goes to stdout
    notice, figures = err.splitlines()
    assert "random weights" in notice
    assert "noise" in notice
    assert re.fullmatch(
        r"\d+ prompt tokens, 8 new · TTFT [\d.]+ ms · inter-token first [\d.]+ ms, steady [\d.]+ ms · "
        r"[\d.]+ tokens/s · state [\d,]+ B a request, [\d,]+ B in all · compiled in [\d.]+ s",
        figures,
    )
    file = tmp_path / "prompt.txt"
    file.write_bytes(prompt.encode())
    stop = whole.text[6:9]
    code, out, _ = run(
        "generate", "--prompt-file", file, "--max-new-tokens", 8, "--stop", "zzz", "--stop", stop, *DEFAULT_FLAGS
    )
    assert (code, out) == (0, whole.text[: whole.text.index(stop)] + "\n")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--temperature", "-1"], "temperature: -1.0 is below 0"),
        (["--top-p", "0"], r"top_p: 0.0 is not a number in \(0, 1\]"),
        (["--seed", "-3"], "seed: -3 is not an integer in"),
        (["--stop", ""], "stop: "),
        (["--max-new-tokens", "9000"], "max_new_tokens: 9000 after a prompt of 2 tokens exceed the 4096 positions"),
        (["--max-length", "9000"], "max_length: 9000 exceeds max_position_embeddings 4096"),
        (["--random", "--engram", "mapped"], "--engram mapped: only the table of a --checkpoint can be mapped"),
        (["--speculative", "6"], r"--speculative: 6 is outside 1 … 5 \(dspark_block_size\)"),
        (["--random", "--weights", "packed"], "--weights packed: the model's weights are not quantised"),
        (["--out", "x.jsonl"], "--prompts and --out belong together"),
        (["--checkpoint", str(MINI8)], "prompt: 'a' cannot be read: the model's vocabulary of 512 tokens"),
        (["--checkpoint", "nowhere"], "No such file or directory"),
        (["--checkpoint", str(MINI8), "--random"], "--random: there is a --checkpoint"),
        (["--image", "a.png"], "--image: the embedded model knows text alone"),
    ],
)
def test_generate_refuses_before_it_makes_an_engine(run, monkeypatch, argv, message):
    monkeypatch.setattr(Engine, "random", None)
    monkeypatch.setattr(Engine, "from_checkpoint", None)
    assert_refused(run("generate", "--prompt", "a", *argv), message)


def test_speculation_is_reported(run, tmp_path, small_checkpoint):
    prompts = write_lines(tmp_path / "in.jsonl", {"tokens": [5, 6, 7]}, {"tokens": [8, 9] * 9, "temperature": 0.9})
    new_tokens = 8
    flags = ["--max-new-tokens", new_tokens, "--checkpoint", small_checkpoint, *SMALL_FLAGS]
    lines = {}
    for name, options in (("plain", []), ("drafts", ["--speculative", 3]), ("auto", ["--speculative"])):
        out = tmp_path / f"{name}.jsonl"
        code, _, err = run("generate", "--prompts", prompts, "--out", out, *flags, *options)
        assert code == 0, err
        lines[name] = [(line["id"], line["tokens"]) for line in sorted(read_lines(out), key=lambda line: line["id"])]
        steps = re.search(r"speculation: [\d.]+ tokens a step in (\d+) steps, mean accepted length ([\d.]+)", err)
        assert (steps is not None) == bool(options)
        if name == "drafts":
            accepted = sum(int(n) for n in re.findall(r"(\d+)/\d+ \(", err))
            assert int(steps[1]) + accepted == 2 * (new_tokens - 1)  # all tokens but the prompts' own
            assert float(steps[2]) == pytest.approx(accepted / int(steps[1]), abs=0.005)
    assert lines["drafts"] == lines["auto"] == lines["plain"]


def test_a_conversation(run, tmp_path, default_engine):
    chat = tmp_path / "chat.json"
    chat.write_text(json.dumps([{"role": "user", "content": "Hello"}]))
    code, out, err = run("generate", "--chat", chat, "--max-new-tokens", 6, *DEFAULT_FLAGS)
    assert code == 0
    settings = default_engine.model.settings
    prompt = ChatFormat(settings.config, default_engine.tokenizer).read(chat)
    [whole] = default_engine.generate([Request(tokens=prompt.tokens, max_new_tokens=6)])
    # Reasoning is on, and noise does not end it: all of the text is reasoning, the answer is empty.
    assert out == "\n"
    assert whole.text.strip() in err
    chat.write_text(json.dumps({"messages": [{"role": "user", "content": "Hello"}], "thinking": {"type": "disabled"}}))
    assert run("generate", "--chat", chat, "--max-new-tokens", 6, *DEFAULT_FLAGS)[1].strip()
    chat.write_text(json.dumps([{"role": "poet", "content": "Hello"}]))
    assert_refused(run("generate", "--random", "--chat", chat), r"chat.json: messages\[0\].role: 'poet' is none of")


def test_conversations_in_a_file(run, tmp_path):
    line = {"messages": [{"role": "user", "content": "Hello"}], "thinking": {"type": "disabled"}, "max_new_tokens": 4}
    prompts, out = write_lines(tmp_path / "in.jsonl", line, {"prompt": "Hello"}), tmp_path / "out.jsonl"
    code, _, err = run("generate", "--prompts", prompts, "--out", out, "--max-new-tokens", 3, *DEFAULT_FLAGS)
    assert code == 0, err
    chat, plain = sorted(read_lines(out), key=lambda line: line["id"])
    assert chat["message"]["role"] == "assistant"
    assert chat["message"]["content"] == chat["text"].lstrip("\n")
    assert "message" not in plain
    prompts = write_lines(tmp_path / "bad.jsonl", line | {"prompt": "x"})
    result = run("generate", "--random", "--prompts", prompts, "--out", tmp_path / "o.jsonl")
    assert_refused(result, r"bad.jsonl:1: \['prompt'\] beside messages")


def test_a_broken_checkpoint_is_one_line(run, tmp_path):
    (tmp_path / "config.json").write_bytes((MINI8 / "config.json").read_bytes())
    prompts = write_lines(tmp_path / "in.jsonl", {"tokens": [3]})
    result = run("generate", "--checkpoint", tmp_path, "--prompts", prompts, "--out", tmp_path / "out.jsonl")
    assert_refused(result, "neither model.safetensors.index.json nor model.safetensors")


# ---------------------------------------------------------------- generate, a file of prompts


@pytest.fixture
def prompts(tmp_path) -> pathlib.Path:
    return write_lines(
        tmp_path / "in.jsonl",
        {"tokens": [5, 6, 7], "id": "first", "max_new_tokens": 3},
        {"tokens": [8, 9], "temperature": 1.0, "seed": 4, "top_p": 0.9},
        "",
        {"tokens": [10, 11, 12, 13], "id": 77, "max_new_tokens": 6},
        {"tokens": [40], "max_new_tokens": 2},
    )


@pytest.fixture
def run_file(run, small_checkpoint):
    """Runs a file of prompts into a file of completions."""

    def call(source: pathlib.Path, out: pathlib.Path) -> tuple[int, str, str]:
        flags = ["--max-new-tokens", 4, "--checkpoint", small_checkpoint, *SMALL_FLAGS]
        return run("generate", "--prompts", source, "--out", out, *flags)

    return call


def test_prompts_to_completions(run_file, prompts, tmp_path, small_engine):
    out = tmp_path / "out.jsonl"
    code, stdout, err = run_file(prompts, out)
    assert (code, stdout) == (0, "")
    assert err.startswith("4 requests: 10 prompt tokens, ")
    lines = {line["id"]: line for line in read_lines(out)}
    assert set(lines) == {"first", 2, 77, 5}  # without an id: the line's number
    expected = small_engine.generate(
        [
            Request(tokens=[5, 6, 7], max_new_tokens=3),
            Request(tokens=[8, 9], temperature=1.0, seed=4, top_p=0.9, max_new_tokens=4),
        ]
    )
    assert lines["first"]["tokens"] == list(expected[0].tokens)
    assert lines[2]["tokens"] == list(expected[1].tokens)
    assert lines["first"]["text"] is None  # no tokenizer has this vocabulary
    assert {line["finish_reason"] for line in lines.values()} <= {"stop", "length"}
    assert lines[77]["figures"]["new_tokens"] == len(lines[77]["tokens"])


def test_an_interrupted_run_goes_on(run_file, prompts, tmp_path, monkeypatch):
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    run_file(prompts, whole)
    lines = whole.read_bytes().splitlines(keepends=True)
    out.write_bytes(lines[0] + lines[1] + lines[2][:-5])  # cut in the middle of the third line
    code, _, err = run_file(prompts, out)
    assert code == 0
    assert "dropped an unfinished last line" in err
    assert "2 of 4 requests are done already" in err
    found, expected = read_lines(out), read_lines(whole)
    assert [line["id"] for line in found[:2]] == [line["id"] for line in expected[:2]]
    key = lambda line: (str(line["id"]), line["tokens"], line["finish_reason"])  # noqa: E731
    assert sorted(map(key, found)) == sorted(map(key, expected))

    before = out.read_bytes()
    monkeypatch.setattr(Engine, "from_checkpoint", None)  # all done: no model is loaded
    code, _, err = run_file(prompts, out)
    assert code == 0
    assert "4 of 4 requests are done already" in err
    assert out.read_bytes() == before


def test_a_whole_last_line_without_line_end_is_made_again(run_file, prompts, tmp_path):
    out = tmp_path / "out.jsonl"
    run_file(prompts, out)
    content = out.read_bytes()
    out.write_bytes(content[:-1])  # everything but the line end was written
    run_file(prompts, out)
    assert len(read_lines(out)) == 4


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"in\.jsonl:2: not JSON"),
        ("[1]", r"in\.jsonl:2: '\[1\]' is not an object"),
        ({"tokens": [5], "max_tokens": 3}, r"in\.jsonl:2: unknown field\(s\) \['max_tokens'\]"),
        ({"tokens": [5], "id": "a"}, r"in\.jsonl:2: id 'a' stands in line 1 already"),
        ({"tokens": [5], "top_p": 2}, r"in\.jsonl:2: top_p: 2 is not a number"),
        ({"tokens": [512]}, r"in\.jsonl:2: tokens: token 512 at position 0 is not in the vocabulary of 512"),
        ({"tokens": [500]}, r"in\.jsonl:2: tokens: token 500 at position 0 stands for a picture"),
        ({"tokens": [5] * 300}, r"in\.jsonl:2: max_new_tokens: 4 after a prompt of 300 tokens exceed the 256"),
        ({"prompt": "hello"}, r"in\.jsonl:2: prompt: 'hello' cannot be read"),
        ({}, r"in\.jsonl:2: prompt, tokens: exactly one of them is needed, neither is given"),
    ],
)
def test_bad_lines_are_refused_before_any_work(run_file, tmp_path, monkeypatch, line, message):
    monkeypatch.setattr(Engine, "from_checkpoint", None)
    source, out = write_lines(tmp_path / "in.jsonl", {"tokens": [3], "id": "a"}, line), tmp_path / "out.jsonl"
    assert_refused(run_file(source, out), message)
    assert not out.exists()


def test_an_explicit_id_can_meet_a_line_number(run_file, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", {"tokens": [3], "id": 2}, {"tokens": [3]})
    assert_refused(run_file(source, tmp_path / "out.jsonl"), "id 2 stands in line 1 already")


def test_empty_and_foreign_files_are_refused(run_file, prompts, tmp_path):
    empty = write_lines(tmp_path / "empty.jsonl")
    assert_refused(run_file(empty, tmp_path / "out.jsonl"), "empty.jsonl: no requests")
    foreign = write_lines(tmp_path / "foreign.jsonl", {"id": "first", "finish_reason": "length"}, "not JSON")
    before = foreign.read_bytes()
    assert_refused(run_file(prompts, foreign), r"foreign\.jsonl:2: not a completion")
    assert foreign.read_bytes() == before
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(b"\xe9\n")
    assert_refused(run_file(latin, tmp_path / "out.jsonl"), r"latin\.jsonl: not UTF-8")


# ---------------------------------------------------------------- the README


def test_the_readme_example_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()


def readme_lines() -> list[str]:
    """The README's command lines that need no checkpoint of the reader's."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("dsv41 generate ")]
    return [line for line in lines if " DIR" not in line]


def test_the_readme_shows_each_part():
    for part in ("--image", "--chat", "--speculative", "--engram"):
        assert sum(part in line for line in readme_lines()) == 1


@pytest.mark.parametrize("line", [line for line in readme_lines() if "--speculative" not in line])
def test_the_readme_command_lines_run(run, monkeypatch, tmp_path, line, default_engine, small_checkpoint):
    """In the shapes that the shared engines have compiled: where a line names a checkpoint, one of fewer layers stands.
    The line with drafts is the embedded model's test."""
    argv = shlex.split(line)[1:]
    for name in argv:
        if name.startswith("tests/"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            checkpoint = (ROOT / name / "model.safetensors.index.json").exists()
            (tmp_path / name).symlink_to(small_checkpoint if checkpoint else ROOT / name)
    monkeypatch.chdir(tmp_path)  # a line may write a file
    flags = SMALL_FLAGS if "--checkpoint" in line else DEFAULT_FLAGS
    limit = [] if "--max-new-tokens" in line else ["--max-new-tokens", "6"]
    code, _, err = run(*argv, *flags, *limit)
    assert code == 0, err
    assert re.search(r"prompt tokens, \d+ new", err)
    assert "speculation: " not in err
    assert ("--engram" in line) == ("Engram: " in err)
