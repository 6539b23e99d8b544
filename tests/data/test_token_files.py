from __future__ import annotations

import contextlib
import json
import os
import pickle
import struct
import subprocess
import sys
import tracemalloc
from collections import Counter
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import quiet_trainer
from trainwright.cli.main import main
from trainwright.core.errors import ConfigurationError
from trainwright.core.task import TaskModule
from trainwright.data import MaskedSpans, MaskedTokens, TokenDataset, TokenFile, TokenFileWriter


def write(path: Path, lengths: list[int], *, vocab_size: int = 2**16, **facts: Any) -> Path:
    """Write documents whose tokens are 0, 1, 2 and so on through all of the file."""
    first = 0
    with TokenFileWriter(path, vocab_size, **facts) as writer:
        for length in lengths:
            writer.add(range(first, first + length))
            first += length
    return path


# Files


def test_a_file_has_the_bytes_of_megatrons_format(tmp_path: Path) -> None:
    write(tmp_path / "a", [3, 0, 2])
    index = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 3, 4)
    index += struct.pack("<3i", 3, 0, 2) + struct.pack("<3q", 0, 6, 6) + struct.pack("<4q", 0, 1, 2, 3)
    assert (tmp_path / "a.idx").read_bytes() == index
    assert (tmp_path / "a.bin").read_bytes() == struct.pack("<5H", *range(5))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx", "a.json"]


@pytest.mark.parametrize("ending", [".idx", ".bin"])
def test_a_truncated_or_foreign_file_is_an_error(ending: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a", [30, 20])
    damaged = tmp_path / f"a{ending}"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(ConfigurationError, match=r"bytes, and its index needs \d+: .* Write or copy it again"):
        TokenFile(path)
    (tmp_path / "a.idx").write_bytes(b"PK")
    with pytest.raises(ConfigurationError, match="is not an index of tokens"):
        TokenFile(path)
    damaged.unlink()
    with pytest.raises(ConfigurationError, match=r"is missing\. Write it with `trainwright data tokenize`"):
        TokenFile(path)


@pytest.mark.parametrize("num_calls", range(6))
def test_a_writer_that_is_killed_never_leaves_new_tokens_under_an_old_index(
    num_calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a", [2, 3])
    calls = 0

    def until_killed(file: Path, original: Any, *args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > num_calls:
            raise KeyboardInterrupt
        return original(file, *args, **options)

    with monkeypatch.context() as patches:
        for name in ("unlink", "replace"):
            patches.setattr(Path, name, partialmethod(until_killed, getattr(Path, name)))
        with contextlib.suppress(KeyboardInterrupt):
            write(tmp_path / "a", [1, 4], vocab_size=300)
    if 0 < num_calls < 4:
        with pytest.raises(ConfigurationError, match=r"a\.idx is missing"):
            TokenFile(path)
        return
    file = TokenFile(path)
    found = file.lengths().tolist(), file.facts["vocab_size"]
    assert found == (([2, 3], 2**16) if num_calls == 0 else ([1, 4], 300))


def test_files_are_on_the_disk_before_they_are_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda handle: events.append("sync") or fsync(handle))
    monkeypatch.setattr(Path, "replace", lambda *args: events.append(args[1].suffix) or replace(*args))
    write(tmp_path / "a", [2, 3])
    assert events[:4] == ["sync"] * 4  # three files, and the folder without the old index
    assert events[4:] == [".json", ".bin", "sync", ".idx", "sync"]


@pytest.mark.parametrize(
    ("offset", "value"),
    [
        (34, 9),  # a length
        (34 + 12 + 8, 4),  # a start
        (34 + 36 + 8, 7),  # a boundary
        (18, 2),  # the number of sequences
    ],
)
def test_a_damaged_index_is_an_error(offset: int, value: int, tmp_path: Path) -> None:
    path = write(tmp_path / "a", [3, 2, 4])
    index = bytearray((tmp_path / "a.idx").read_bytes())
    index[offset] = value
    (tmp_path / "a.idx").write_bytes(index)
    with pytest.raises(ConfigurationError, match=r"a\.idx is damaged: its lengths"):
        TokenFile(path)


def test_a_large_file_is_open_at_once_and_needs_no_memory(tmp_path: Path) -> None:
    with (tmp_path / "a.bin").open("wb") as stream:
        stream.truncate(2 * 10**10)  # without blocks on the disk
    num, length = 10, 10**9
    starts = [2 * length * i for i in range(num)]
    index = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, num, num + 1) + struct.pack(f"<{num}i", *[length] * num)
    (tmp_path / "a.idx").write_bytes(index + struct.pack(f"<{num}q", *starts) + struct.pack("<11q", *range(11)))
    tracemalloc.start()
    data = TokenDataset(tmp_path / "a", 2048, documents="separate")
    assert len(data) == (10**10 - 1) // 2048
    assert data[len(data) - 1]["input_ids"].shape == (2048,)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    sample = pickle.loads(pickle.dumps(data))[7]["input_ids"]  # as for a spawned worker
    assert torch.equal(sample, data[7]["input_ids"])


# Samples


def test_every_token_is_an_input_and_a_target_once(tmp_path: Path) -> None:
    data = TokenDataset(write(tmp_path / "a", [7, 5, 9]), 4)
    samples = [data[i] for i in range(len(data))]
    assert [sample["input_ids"].tolist() for sample in samples] == [list(range(4 * i, 4 * i + 4)) for i in range(5)]
    assert all(torch.equal(sample["shift_labels"], sample["input_ids"] + 1) for sample in samples)
    assert all(torch.equal(sample["labels"], sample["input_ids"]) for sample in samples)
    assert set(samples[0]) == {"input_ids", "labels", "shift_labels"}


def test_separate_documents_have_positions_and_targets_of_their_own(tmp_path: Path) -> None:
    data = TokenDataset(write(tmp_path / "a", [3, 1, 5, 4]), 6, documents="separate")
    assert data[0]["position_ids"].tolist() == [0, 1, 2, 0, 0, 1]
    assert data[0]["shift_labels"].tolist() == [1, 2, -100, -100, 5, 6]
    assert data[1]["position_ids"].tolist() == [0, 1, 2, 0, 1, 2]
    assert data[1]["shift_labels"].tolist() == [7, 8, -100, 10, 11, 12]


def test_packed_samples_hold_complete_documents(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(1, 30, 300).tolist()
    path = write(tmp_path / "a", [*lengths, 50])
    data = TokenDataset(path, 32, documents="packed", pad_token=9)
    seen: Counter[int] = Counter()
    for i in range(len(data)):
        sample = data[i]
        there = sample["labels"] >= 0
        assert torch.equal(sample["input_ids"][~there], torch.full((int((~there).sum()),), 9))
        seen.update(sample["input_ids"][there].tolist())
        following = sample["shift_labels"] >= 0
        assert torch.equal(sample["shift_labels"][following], sample["input_ids"][following] + 1)
        assert int((there & ~following).sum()) == int((sample["position_ids"][there] == 0).sum())  # a last one each
    assert seen == Counter(range(sum(lengths) + 50))  # each token once
    assert len(data) < 1.1 * (sum(lengths) + 50) / 32
    plans = [file.stat().st_mtime_ns for file in tmp_path.glob(".a.packed-*")]
    assert len(plans) == 1
    TokenDataset(path, 32, documents="packed")
    assert [file.stat().st_mtime_ns for file in tmp_path.glob(".a.packed-*")] == plans  # used again


def test_weights_determine_how_many_samples_each_file_gives(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a", [100]), write(tmp_path / "b", [1000])
    mixed = TokenDataset({first: 0.7, second: 0.3}, 10, num_samples=1001)
    assert len(mixed) == 1001
    lengths = [len(TokenDataset(path, 10)) for path in (first, second)]
    assert lengths == [9, 99]
    of_first = [int(mixed[i]["input_ids"][0]) for i in range(701)]
    assert set(Counter(of_first).values()) <= {77, 78}  # 701 samples from 9
    of_second = [int(mixed[i]["input_ids"][0]) for i in range(701, 1001)]
    assert len(set(of_second[:99])) == 99
    assert of_second[:99] != sorted(of_second[:99])
    assert len(TokenDataset([first, second], 10)) == 108
    with pytest.raises(ConfigurationError, match="num_samples=-5: write at least 1"):
        TokenDataset(second, 10, num_samples=-5)
    few = TokenDataset(second, 10, num_samples=20)
    assert len({few[i]["input_ids"][0].item() for i in range(20)}) == 20


@pytest.mark.parametrize(("part", "boundary"), [(0.5, 480), (0.9, 880), (0.99, 880), (0.01, 480)])
def test_a_split_is_at_the_nearest_boundary_of_documents(tmp_path: Path, part: float, boundary: int) -> None:
    path = write(tmp_path / "a", [480, 400, 121])
    first, second = (TokenDataset(path, 10, split=split) for split in ((0, part), (part, 1)))
    assert len(first) == (boundary - 1) // 10
    assert int(second[0]["input_ids"].min()) >= boundary


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"files": "a", "length": 2000}, "has no sample of length=2000"),
        ({"files": ["a", "b"], "length": 4}, r"tokenizer 'two', and .*a with 'one'.*Tokenize both"),
        ({"files": "a", "length": 4, "vocab_size": 50}, "a vocabulary of 65536, and the model's is 50"),
        ({"files": {"a": -1.0}, "length": 4}, "write positive numbers"),
        ({"files": [], "length": 4}, "files is empty"),
        ({"files": "a", "length": 4, "documents": "whole"}, "Use 'joined', 'separate' or 'packed'"),
        ({"files": "a", "length": 0}, "length=0"),
        ({"files": "a", "length": 9, "transform": MaskedTokens(8, 1, 2)}, "length=9, and the transform has length=8"),
    ],
)
def test_what_a_dataset_cannot_read_is_an_error(arguments: Any, message: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("a"), [100], tokenizer="one")
    write(Path("b"), [100], tokenizer="two")
    with pytest.raises(ConfigurationError, match=message):
        TokenDataset(**arguments)


def test_masked_tokens_are_predicted(tmp_path: Path) -> None:
    path = write(tmp_path / "a", [40000], vocab_size=50000)
    transform = MaskedTokens(1000, mask_token=49999, vocab_size=50000, special_tokens=range(100))
    data = TokenDataset(path, 1000, transform=transform)
    samples = [data[i] for i in range(39)]
    ids = torch.stack([sample["input_ids"] for sample in samples])
    labels = torch.stack([sample["labels"] for sample in samples])
    texts = torch.arange(39000).view(39, 1000)
    chosen = labels != -100
    assert torch.equal(labels[chosen], texts[chosen])
    assert torch.equal(ids[~chosen], texts[~chosen])
    assert not chosen[0, :100].any()
    assert float(chosen[1:].float().mean()) == pytest.approx(0.15, abs=0.01)
    assert float((ids[chosen] == 49999).float().mean()) == pytest.approx(0.8, abs=0.03)
    assert float((ids[chosen] == texts[chosen]).float().mean()) == pytest.approx(0.1, abs=0.02)
    assert torch.equal(data[3]["input_ids"], ids[3])


def test_masked_spans_are_written_again(tmp_path: Path) -> None:
    path = write(tmp_path / "a", [4000], vocab_size=5000)
    masks = range(4999, 4899, -1)
    transform = MaskedSpans(200, masks, eos_token=4800)
    data = TokenDataset(path, 200, transform=transform)
    for i in range(len(data)):
        sample = data[i]
        ids, labels = sample["input_ids"].tolist(), sample["labels"].tolist()
        assert (len(ids), len(labels)) == (transform.input_length, transform.target_length) == (181, 41)
        assert ids[-1] == labels[-1] == 4800
        spans: dict[int, list[int]] = {}
        for token in labels[:-1]:
            if token in masks:
                spans[token] = []
            else:
                spans[list(spans)[-1]].append(token)
        text = [part for token in ids[:-1] for part in spans.get(token, [token])]
        assert text == list(range(200 * i, 200 * i + 200))
        assert list(spans) == list(masks[: len(spans)])
    with pytest.raises(ConfigurationError, match="have 10 spans, and there are 3 masks"):
        MaskedSpans(200, masks[:3], eos_token=4800)
    with pytest.raises(ConfigurationError, match="at least 2 tokens, not 1"):
        transform(np.arange(1), np.random.default_rng(0))


class _Reader(TaskModule):
    """Writes down the first token of each sample that it trains on."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.seen = nn.Embedding(2**14, 1), list[int]()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen += batch["input_ids"][batch["labels"] >= 0].tolist()
        found: torch.Tensor = self.embed(batch["input_ids"]).mean()
        return found

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _read(folder: Path, stop: int, resume: Path | None = None) -> list[int]:
    data = TokenDataset(folder / "a", 16, documents="packed")
    task = _Reader()
    trainer = quiet_trainer(devices="auto", max_epochs=1, max_steps=stop, accumulate_grad_batches=1, seed=0)
    trainer.fit(task, DataLoader(data, batch_size=2, shuffle=True), ckpt_path=resume)
    if resume is None:
        trainer.save_checkpoint(folder / "saved")
    return task.seen


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore:.*random number generators")
def test_a_resumed_epoch_on_other_ranks_repeats_and_skips_no_token(tmp_path: Path) -> None:
    lengths = np.random.default_rng(1).integers(1, 16, 400).tolist()
    write(tmp_path / "a", lengths)
    before = run_distributed(_read, 2, tmp_path, 30, init=False, timeout=60)
    after = _read(tmp_path, -1, tmp_path / "saved")
    assert Counter([token for seen in [*before, after] for token in seen]) == Counter(range(sum(lengths)))


# The command


def test_texts_and_json_lines_become_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n\nthree\n", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"body": "vier"}\n\n{"body": "fünf"}\n', encoding="utf-8")
    arguments = ["data", "tokenize", str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl"), "--tokenizer", "bytes"]
    assert main([*arguments, "--key", "body", "--output", str(tmp_path / "out")]) == 0
    assert "4 documents" in capsys.readouterr().out
    file = TokenFile(tmp_path / "out")
    texts = [bytes(file[i][:-1].tolist()).decode() for i in range(4)]
    assert texts == ["one\ntwo\n", "three\n", "vier", "fünf"]
    assert all(file[i][-1] == 256 for i in range(4))
    assert file.facts == {"tokenizer": "bytes", "eod": 256, "vocab_size": 257}
    assert main(["data", "show", str(tmp_path / "out.bin"), "--document", "2"]) == 0
    assert capsys.readouterr().out == "118 105 101 114 256\n"
    assert main([*arguments, "--output", str(tmp_path / "out")]) == 2
    assert "b.jsonl, line 1 is not a JSON object with 'text'. Pass --key" in capsys.readouterr().err
    assert TokenFile(tmp_path / "out").num_documents == 4  # what was there stays


def word_lengths(text: str) -> list[int]:
    return [len(word) for word in text.split()]


@pytest.mark.exhaustive
def test_a_function_in_the_current_folder_is_a_tokenizer_and_its_errors_end_all_processes(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def words(text):\n    return text.split()\ndef one(text):\n    return [1]\n")
    (tmp_path / "a.txt").write_text("a b\n\nc\n", encoding="utf-8")
    command = [str(Path(sys.executable).with_name("trainwright")), "data", "tokenize", "a.txt", "--output", "out"]
    options = ["--vocab-size", "9", "--processes", "2", "--tokenizer"]
    done = subprocess.run([*command, *options, "mine:words"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "document 0 has tokens of <U1, expected integers" in done.stderr) == (2, True)
    subprocess.run([*command, *options, "mine:one"], cwd=tmp_path, capture_output=True, check=True, timeout=60)
    assert TokenFile(tmp_path / "out").num_tokens == 2


@pytest.mark.requires("tokenizers", reason="loads a tokenizer")
def test_tokenizers_are_files_folders_or_functions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2, "</s>": 3}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("a b\na c a", encoding="utf-8")
    arguments = ["data", "tokenize", str(tmp_path / "a.txt"), "--output", str(tmp_path / "out"), "--tokenizer"]
    for tokenizer in ("tokenizer.json", ""):
        assert main([*arguments, str(tmp_path / tokenizer)]) == 0
        assert TokenFile(tmp_path / "out")[0].tolist() == [0, 1, 0, 2, 0, 3]
    assert main([*arguments, str(tmp_path / "tokenizer.json"), "--eod", "b", "--documents", "line"]) == 0
    assert TokenFile(tmp_path / "out")[0].tolist() == [0, 1, 1]
    assert main([*arguments, f"{__name__}:word_lengths", "--vocab-size", "9"]) == 0
    assert TokenFile(tmp_path / "out")[0].tolist() == [1, 1, 1, 1, 1]
    assert json.loads((tmp_path / "out.json").read_text())["eod"] is None
    capsys.readouterr()
    for wrong, message in [
        ([f"{__name__}:word_lengths"], "is a function: pass --vocab-size"),
        (["none.json"], "none.json is missing"),
        (["bytes", "--vocab-size", "300"], "--vocab-size 300 is for functions"),
        ([str(tmp_path / "tokenizer.json"), "--eod", "<end>"], "'<end>' is not a token of the tokenizer"),
    ]:
        assert main([*arguments, *wrong]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "[]", '{"vocab_size": "many"}'])
def test_a_damaged_description_is_an_error(text: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a", [3])
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ConfigurationError, match=r"a\.json is damaged: .*Write it again"):
        TokenFile(path)


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="has the tokens 0 to 9, and vocab_size=9"):
        write(tmp_path / "a", [10], vocab_size=9)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("documents", ["joined", "packed"])
def test_tokens_outside_of_the_vocabulary_are_an_error(documents: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a", [16, 16], vocab_size=32)
    tokens = np.fromfile(tmp_path / "a.bin", np.uint16)
    tokens[20] = 32
    tokens.tofile(tmp_path / "a.bin")
    data = TokenDataset(path, 8, documents=documents)
    with pytest.raises(ConfigurationError, match=r"a\.bin has the tokens .* to 32 in sample \d, expected 0 to 31"):
        [data[i] for i in range(len(data))]


@pytest.mark.slow
@pytest.mark.requires("tokenizers", reason="loads a tokenizer")
def test_a_hub_without_a_network_is_tried_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a b", encoding="utf-8")
    command = [sys.executable, "-m", "trainwright", "data", "tokenize", "a.txt"]
    command += ["--output", "out", "--tokenizer", "me/it"]
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "home")}

    failed = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert failed.returncode == 2
    assert "hub cannot be reached" in failed.stderr
    assert "Pass a local folder, or set HF_HOME" in failed.stderr
    assert "Retrying" not in failed.stderr
