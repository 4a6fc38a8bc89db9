"""The command from flags to files, over a fake engine."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from byte_model import END, byte_tokenizer, write_byte_model
from fake_engine import FakeEngine

from lockstep.launcher.cli import guarded


def ids_of(text: str) -> list[int]:
    ids: list[int] = byte_tokenizer().encode(text).ids
    return ids


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "model").mkdir()
    return write_byte_model(tmp_path / "model")


def run(model: str, *argv: str, engine: FakeEngine | None = None) -> tuple[int, FakeEngine]:
    engine = engine or FakeEngine()
    code = guarded(["generate", "--model", model, "--device", "cpu", *argv], engine.start)
    return code, engine


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_prompt_answers_on_stdout_alone(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, engine = run(model, "--raw", "hello \U0001f600")
    out, err = capsys.readouterr()
    assert code == 0
    assert out == "hello \U0001f600\n"
    assert "1 ranks (tp 1 x dp 1) on cpu through fake" in err
    assert "graph mode FULL_DECODE_ONLY" in err and "4 graphs captured" in err
    assert "tokens/s" in err
    assert engine.shutdowns == 1


def test_the_chat_template_is_used_unless_raw(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(model, "hi")
    assert capsys.readouterr().out == "[hi]\n"
    run(model, "--raw", "hi")
    assert capsys.readouterr().out == "hi\n"


def test_several_answers_in_input_order(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(model, "--raw", "a much longer one", "b")
    assert capsys.readouterr().out == "> a much longer one\na much longer one\n\n> b\nb\n\n"


def test_jsonl_in_and_out(model: str, tmp_path: Path) -> None:
    lines = [
        '{"prompt": "long answer", "max_tokens": 4}',
        '{"prompt": "x", "temperature": NaN}',
        "nonsense",
        json.dumps({"messages": [{"role": "user", "content": "hi"}]}),
        json.dumps({"prompt_token_ids": ids_of("ids"), "logprobs": 1}),
        '{"prompt": "a\\ud800"}',
        '{"prompt": "end"}',
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(lines))
    code, engine = run(
        model, "--raw", "--prompts-file", str(source), "--output", str(target), "--max-tokens", "9"
    )
    out = records(target)
    assert code == 1
    assert [record["index"] for record in out] == list(range(7))
    assert out[0] == {
        "index": 0,
        "prompt": "long answer",
        "text": "long",
        "token_ids": ids_of("long"),
        "finish_reason": "length",
        "num_prompt_tokens": 11,
    }
    assert set(out[1]) == {"index", "prompt", "error"}
    assert out[1]["prompt"] == "x"
    assert "temperature must be a finite number" in out[1]["error"]
    assert "line 3" in out[2]["error"]
    assert (out[3]["prompt"], out[3]["text"]) == ("[hi]", "[hi]")
    assert (out[4]["prompt"], out[4]["text"]) == (None, "ids")
    assert [one["token"] for one in out[4]["logprobs"]] == ["i", "d", "s"]
    assert out[4]["logprobs"][0]["top"] == [
        {"token_id": ids_of("i")[0], "token": "i", "logprob": -0.5}
    ]
    assert "no valid Unicode" in out[5]["error"]
    assert out[6]["text"] == "end"
    assert len(engine.added) == 4


def test_every_error_of_a_file_begins_with_its_line(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["", "nonsense", '{"prompt": "x", "top_p": 2}', '{"prompt": "far too long"}', ""]
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join([*lines, '{"prompt": "x"}', '{"prompt": "x", "top": 1}']))
    argv = ("--raw", "--prompts-file", str(source))
    run(model, *argv, "--output", str(tmp_path / "out"), engine=FakeEngine(max_model_len=8))
    begun = [record.get("error", "")[:8] for record in records(tmp_path / "out")]
    assert begun == ["line 2: ", "line 3: ", "line 4: ", "", "line 7: "]
    capsys.readouterr()
    run(model, *argv, engine=FakeEngine(max_model_len=8))
    assert "lockstep: request 1 failed: line 3: top_p must" in capsys.readouterr().err


def test_what_the_scheduler_refuses_is_that_requests_error(model: str, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    engine = FakeEngine(max_model_len=8)
    code, _ = run(
        model, "--raw", "short", "far too long", "fine", "--output", str(target), engine=engine
    )
    assert code == 1
    assert [record.get("text") for record in records(target)] == ["short", None, "fine"]
    assert "max_model_len=8" in records(target)[1]["error"]


def test_a_failed_request_is_no_empty_answer(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    silent = FakeEngine(lambda ids: [] if ids == ids_of("none") else ids, max_model_len=8)
    code, _ = run(model, "--raw", "far too long", "none", "fine", engine=silent)
    out, err = capsys.readouterr()
    assert (code, out) == (1, "> far too long\n! failed\n\n> none\n\n\n> fine\nfine\n\n")
    assert "lockstep: request 0 failed: prompt must be below max_model_len=8 tokens\n" in err
    code, _ = run(model, "--raw", "far too long", engine=FakeEngine(max_model_len=8))
    assert (code, capsys.readouterr().out) == (1, "")


def test_a_request_that_fails_midway_keeps_what_was_shown(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = run(model, "--raw", "abc", "de", engine=FakeEngine(dies_after=2))
    assert (code, capsys.readouterr().out) == (4, "> abc\nab\n! failed\n\n> de\nde\n\n")


def test_records_on_standard_output_are_alone_there(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _ = run(model, "--raw", "a", "b", "--output", "-")
    out = capsysbinary.readouterr().out
    assert (code, [json.loads(line)["text"] for line in out.splitlines()]) == (0, ["a", "b"])
    assert not (tmp_path / "-").exists()


@pytest.mark.parametrize("named", [True, False])
def test_an_empty_input_is_told_before_the_start(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, named: bool
) -> None:
    (tmp_path / "empty").touch()
    with open(tmp_path / "empty") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        code, engine = run(model, *(["--prompts-file", str(tmp_path / "empty")] if named else []))
    where = f"--prompts-file {tmp_path}/empty" if named else "standard input"
    assert (code, engine.shutdowns) == (2, 0)
    assert capsys.readouterr().err == f"lockstep: no prompts: {where} is empty\n"


@pytest.mark.parametrize("source", ["/dev/null", "blank.txt"])
def test_without_a_prompt_nothing_is_started(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, source: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("blank.txt").write_text("\n  \n")
    written = ["--output", "out.jsonl", "--batch-histogram", "sizes.json"]
    code, engine = run(model, "--prompts-file", source, *written)
    assert (code, engine.shutdowns) == (0, 0)
    assert (Path("out.jsonl").read_text(), Path("sizes.json").read_text()) == ("", "{}\n")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"lockstep: nothing to do: --prompts-file {source} has only blank lines")


@pytest.mark.parametrize("tokens_per_poll", [1, 3, 100])
def test_stop_strings_cut_and_abort(model: str, tmp_path: Path, tokens_per_poll: int) -> None:
    target = tmp_path / "out.jsonl"
    engine = FakeEngine(tokens_per_poll=tokens_per_poll)
    run(
        model, "--raw", "ab<STOP>cd", "--stop", "<STOP>", "--output", str(target), engine=engine
    )  # fmt: skip
    (record,) = records(target)
    assert record["text"] == "ab"
    assert record["token_ids"] == ids_of("ab<STOP>")
    assert record["finish_reason"] == "stop"
    assert engine.aborted == ["r0"]


def test_stop_strings_wait_for_min_tokens(model: str, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    run(
        model, "--raw", "a.b.c", "--stop", ".", "--min-tokens", "2", "--output", str(target)
    )  # fmt: skip
    assert records(target)[0]["text"] == "a.b"


def test_the_end_token_is_an_id_and_not_text(model: str, tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    engine = FakeEngine(lambda ids: [*ids, END, *ids])
    run(model, "--raw", "hi", "--output", str(target), engine=engine)
    (record,) = records(target)
    assert record["token_ids"] == [*ids_of("hi"), END]
    assert (record["text"], record["finish_reason"]) == ("hi", "stop")


def test_text_files_and_stdin(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "prompts.txt"
    source.write_text("one\n\ntwo\n")
    run(model, "--raw", "--prompts-file", str(source))
    assert capsys.readouterr().out == "> one\none\n\n> two\ntwo\n\n"
    source.write_text('{"prompt": "three"}\n')
    with open(source) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        run(model, "--raw", "--prompts-file", "-")
    assert capsys.readouterr().out == "> three\nthree\n\n"


@pytest.mark.parametrize(
    ("name", "content", "answers", "told"),
    [
        ("a", b'\xef\xbb\xbf{"prompt": "x"}\n', ["x"], "1 begins with a brace, so"),
        ("a.txt", b'{"a": no}\n{"prompt": "x"}\n', [None, "x"], "1 begins with a brace, so"),
        ("a.txt", b"\xef\xbb\xbfx\n{y}\n{z}\n", ["x", "{y}", "{z}"], "2 begins with a brace, but"),
        ("a.txt", b"\nx\ny}\n", ["x", "y}"], None),
        ("a.jsonl", b'{"prompt": "x"}\n', ["x"], None),
    ],
)
def test_the_format_is_guessed_by_the_first_line_and_a_doubtful_guess_is_told(
    model: str, tmp_path: Path, capsys: Any, name: str, content: bytes, answers: Any, told: Any
) -> None:
    source, target = tmp_path / name, tmp_path / "out"
    source.write_bytes(content)
    code, _ = run(model, "--raw", "--prompts-file", str(source), "--output", str(target))
    assert ([record.get("text") for record in records(target)], code) == (answers, None in answers)
    notes = [line for line in capsys.readouterr().err.splitlines() if "prompts: line" in line]
    assert len(notes) == (told is not None)
    assert told is None or (told in notes[0] and "--prompts-format" in notes[0])


def test_dummy_weights_need_no_tokenizer(tmp_path: Path) -> None:
    model = write_byte_model(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt_token_ids": [1, 2]}\n{"prompt": "text"}\n')
    files = ["--prompts-file", str(source), "--output", str(target)]
    code, _ = run(model, "--load-format", "dummy", *files)
    assert code == 1
    ids, text = records(target)
    assert (ids["token_ids"], ids["text"]) == ([1, 2], "")
    assert text["error"] == "line 2: prompt: this model has no tokenizer; give prompt_token_ids"
    code, _ = run(model, *files)
    assert code == 2


def test_text_that_nothing_can_read_is_refused_before_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_byte_model(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "prompts.txt").write_text("text\n")
    for prompts in (["text"], ["--prompts-file", str(tmp_path / "prompts.txt")]):
        code, engine = run(model, "--load-format", "dummy", *prompts)
        assert (code, engine.shutdowns) == (2, 0)
        assert "lockstep: prompt: this model has no tokenizer" in capsys.readouterr().err


def test_defaults_come_from_the_models_files_and_flags_win(tmp_path: Path) -> None:
    model = write_byte_model(tmp_path, temperature=0.6, top_k=20)
    _, engine = run(model, "a")
    sampling = engine.added[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.6, 20, 256)
    _, engine = run(model, "a", "--temperature", "0", "--max-tokens", "3")
    sampling = engine.added[0].sampling
    assert (sampling.temperature, sampling.max_tokens) == (0.0, 3)


def test_requests_in_flight_are_bounded(model: str, tmp_path: Path) -> None:
    source = tmp_path / "prompts.txt"
    source.write_text("line\n" * 100)
    _, engine = run(model, "--prompts-file", str(source), "--max-num-seqs", "4")
    assert len(engine.added) == 100
    assert engine.most_running == 8
    _, engine = run(model, "--prompts-file", str(source), "--max-concurrency", "1")
    assert engine.most_running == 1


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ([], "no prompts"),
        (["a", "--prompts-file", "x"], "both"),
        (["--prompts-file", "/does/not/exist"], "there is no such file"),
        (["a", "--output", "/does/not/exist/o.jsonl"], "its folder does not exist"),
        (["--prompts-file", "/"], "it is a folder"),
        (["a", "--output", "/"], "--output /: it is a folder"),
        (["--prompts-file", __file__, "--output", __file__], "prompts are read from it"),
        (["caf\udce9"], r"is not valid UTF-8: 'caf\udce9'"),
        (["a", "--temperature", "nan"], "temperature must be a finite number"),
        (["a", "--max-tokens", "0"], r"max_tokens must be in [1, 2**31), got 0"),
        (["a", "--logit-bias", "[]"], "logit_bias"),
        (["a", "--structured-outputs", '{"regex": "("}'], "structured_outputs: regex"),
        (["a", "--max-concurrency", "0"], "max_concurrency must be at least 1, got 0"),
        (["a", "-tp", "0"], "tensor_parallel_size: expected `int` >= 1"),
        (["a", "--max-model-len", "513"], "at most the model's 512, got 513"),
        (["a", "--config", "/does/not/exist.toml"], "exist.toml: there is no such file\n"),
    ],
)
def test_what_cannot_work_is_refused_before_the_start(
    model: str, argv: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, engine = run(model, *argv)
    assert code == 2
    assert named in capsys.readouterr().err
    assert not engine.added


def test_a_lost_rank_ends_with_its_name_and_code_4(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, engine = run(model, "hello", engine=FakeEngine(dies_after=2))
    assert code == 4
    assert capsys.readouterr().err.splitlines()[-1] == (
        "lockstep: rank 1 is lost: it was told to be"
    )
    assert engine.shutdowns == 1


def test_an_interrupt_ends_the_engine(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(ids: list[int]) -> list[int]:
        raise KeyboardInterrupt

    code, engine = run(model, "hello", engine=FakeEngine(interrupt))
    assert (code, engine.shutdowns) == (130, 1)


def test_sigterm_ends_the_engine(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def terminate(ids: list[int]) -> list[int]:
        os.kill(os.getpid(), signal.SIGTERM)
        return ids

    code, engine = run(model, "hello", engine=FakeEngine(terminate))
    signal.signal(signal.SIGTERM, before)
    assert (code, engine.shutdowns) == (143, 1)
    assert capsys.readouterr().err.endswith("lockstep: terminated\n")


def test_a_tokenizer_that_is_not_there_is_refused_before_the_start(model: str) -> None:
    code, engine = run(model, "hello", "--tokenizer", "/nowhere")
    assert (code, engine.shutdowns) == (2, 0)


def test_a_histogram_does_not_replace_the_answers(model: str, tmp_path: Path) -> None:
    file = tmp_path / "same.jsonl"
    code, _ = run(model, "hello", "--output", str(file), "--batch-histogram", str(file))
    assert code == 2 and not file.exists()


@pytest.mark.parametrize("argv", [["plan"], ["backends"]])
def test_a_full_disk_is_one_line(argv: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "lockstep", *argv],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=180,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "lockstep: no space is left where the output goes\n"


def test_answers_that_nobody_can_read_are_no_success() -> None:
    plan = f"{sys.executable} -P -m lockstep plan --json >&-"
    done = subprocess.run(["bash", "-c", plan], stderr=subprocess.PIPE, timeout=180)
    assert (done.returncode, done.stderr) == (141, b"")


def test_an_output_that_cannot_be_opened_is_one_line(model: str, capsys, monkeypatch) -> None:
    monkeypatch.setattr(os, "access", lambda *asked: True)
    code, engine = run(model, "a", "--output", "/proc/answers.jsonl")
    assert code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("lockstep: --output /proc/answers.jsonl: it cannot be written: ")


def test_a_reader_that_leaves_ends_the_run_quietly(model: str) -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from fake_engine import FakeEngine\n"
        "from lockstep.launcher.cli import guarded\n"
        "raise SystemExit(guarded(sys.argv[2:], FakeEngine().start))\n"
    )
    argv = ["generate", "--model", model, "--device", "cpu", *["word"] * 1000]
    run = subprocess.Popen(
        [sys.executable, "-c", program, str(Path(__file__).parent), *argv],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert run.stdout and run.stderr
    run.stdout.readline()
    run.stdout.close()
    errors = run.stderr.read()
    run.stderr.close()
    assert run.wait(timeout=180) == 141
    assert "Traceback" not in errors
    assert "BrokenPipe" not in errors


def test_what_is_piped_in_is_read(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"one\ntwo\n")
    os.close(writer)
    with os.fdopen(reader) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        run(model, "--raw")
    assert capsys.readouterr().out == "> one\none\n\n> two\ntwo\n\n"


def test_a_pipe_can_be_the_prompts_file(model: str, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text('{"prompt": "from a pipe"}\n'))
    writer.start()
    target = tmp_path / "out.jsonl"
    run(model, "--raw", "--prompts-file", str(pipe), "--output", str(target))
    writer.join()
    assert records(target)[0]["text"] == "from a pipe"
