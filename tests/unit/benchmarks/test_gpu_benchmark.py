"""The benchmark that a GPU's first minutes go to runs from end to end where there is none: what breaks there
costs rented time."""

import json
from pathlib import Path

import pytest
import torch

import gpu
import gpu_kernels
import gpu_training
from myriad.kernels.attention_choice import read_times
from myriad.model.config import ModelConfig


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["gpu.py", *arguments])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # and put back afterwards
    gpu.main()


def test_every_kernel_is_measured(monkeypatch, capsys) -> None:
    monkeypatch.setattr("gpu_timing._MOST_ROUNDS", 1)
    run(monkeypatch, "--device", "cpu", "--small", "--no-compile", "--only", "kernels")
    rows = capsys.readouterr().out.splitlines()
    for operator in (
        "RMSNorm",
        "LayerNorm",
        "SwiGLU",
        "GELU",
        "rotary",
        "output and loss",
        "float8, one scale",
        "float8, scales of blocks",
        "attention, 128, window",
        "pieces, window",
        "pieces, documents",
    ):
        own = [row for row in rows if row.startswith(operator)]
        assert own and all(row.endswith("%") for row in own), operator
    assert any("float8-blocks" in row for row in rows)


def test_every_training_has_a_figure_and_a_prediction(monkeypatch, capsys) -> None:
    monkeypatch.setattr(gpu_training, "_STEPS", 1)
    monkeypatch.setattr(gpu_training, "_MICRO_BATCHES", 1)
    monkeypatch.setattr(gpu_training, "SMALL_CASES", gpu_training.SMALL_CASES[6:8])
    run(monkeypatch, "--device", "cpu", "--small", "--no-compile", "--only", "training")
    rows = [row for row in capsys.readouterr().out.splitlines() if row.startswith("tiny")]
    assert len(rows) == 2 and all(row.endswith("%") for row in rows)
    assert "float8" in rows[0] and "Llama" in rows[1]


def test_the_planner_predicts_without_a_gpu_that_float8_pays_in_large_layers(monkeypatch, capsys) -> None:
    run(monkeypatch, "--predict", "h100-sxm-80gb")
    rows = {row[:46].strip(): row.split() for row in capsys.readouterr().out.splitlines() if "%" in row}
    assert len(rows) == len(gpu_training.CASES)
    plain, quick = (rows[f"Llama-3-8B layers, 8192{end}"] for end in ("", ", float8"))
    assert float(quick[-4].replace(",", "")) > float(plain[-4].replace(",", ""))
    assert float(plain[-1]) < 80


def test_the_quickest_path_is_written_where_it_is_read(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr("gpu_timing._MOST_ROUNDS", 1)
    file = tmp_path / "times.json"
    run(monkeypatch, "--device", "cpu", "--small", "--choose", "--out", str(file))
    assert len(read_times(file)) == len(json.loads(file.read_text())["attention"]) == 4


def test_a_window_counts_its_own_pairs_and_full_attention_both_ways() -> None:
    model = ModelConfig(layers=2, hidden=64, heads=2, sequence=64)
    one = gpu_training.Figures(100.0, 0.0)
    assert one.mfu(model, 1e12, attended=True) < one.mfu(model, 1e12, attended=False)
    windowed = model.model_copy(update={"window": 16})
    assert one.mfu(windowed, 1e12, attended=True) == pytest.approx(one.mfu(windowed, 1e12, attended=False))


def test_without_a_gpu_it_prints_what_to_do(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="--device cpu --small"):
        run(monkeypatch)
    assert gpu_kernels.LARGE.windows == (None, 512)
