"""What the doctor measures, and what it says about processors."""

import pytest
from test_doctor import changed, ranks  # noqa: F401

from distgpt.core.comm.serial import SerialComm
from distgpt.core.cpu.compiling import processor
from distgpt.core.cpu.compiling.processor import AMX, AVX512, AVX512_BF16
from distgpt.core.cpu.kernels import Bfloat16Kernels
from distgpt.doctor import facts, speed
from distgpt.doctor import report as doctor


@pytest.fixture(autouse=True)
def no_mpi(monkeypatch):
    monkeypatch.setattr(doctor, "distant_mpi", lambda: {"problem": "not asked"})


def lines_of(found, capsys):
    doctor.show(found)
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_it_measures_what_multiplies_matrices(capsys):
    found, _ = doctor.examine(measured=True)
    (rank,) = found["ranks"]
    assert set(rank["features"]["names"]) <= set(speed.FEATURES)
    for dtype in ("float32", "bfloat16"):
        fact = rank["matmul"][dtype]
        assert fact["how"].startswith(("own kernels", "BLAS")), fact
        assert fact["gflops"] > 0 and fact["problem"] == ""
        (line,) = [line for line in lines_of(found, capsys) if line.startswith(dtype)]
        assert "GFLOP/s with" in line
    assert "matmul" not in doctor.examine()[0]["ranks"][0]


def test_what_fails_while_measuring_is_a_fact(capsys, monkeypatch):
    def broken(kernels, seconds):
        raise MemoryError("no room\nat all")

    monkeypatch.setattr(speed, "matmul_rate", broken)
    found, _ = doctor.examine(measured=True)
    assert found["ranks"][0]["matmul"]["float32"]["problem"] == "no room"
    assert any(line.endswith("not measured (no room)") for line in lines_of(found, capsys))
    unkept = facts.matmuls(SerialComm(), {**facts.compute(), "loops": None})
    assert "cannot be kept" in unkept["bfloat16"]["problem"] and unkept["bfloat16"]["gflops"] is None


def test_processors_that_differ_and_rates_of_many_ranks_are_told_apart(ranks):
    rated = [
        {**rank, "matmul": {"float32": {"how": "BLAS", "problem": "", "threads": 1, "gflops": 100.0 + n}}}
        for n, rank in enumerate(ranks)
    ]
    (line,) = [text for name, text in doctor._processors(rated) if name == "float32"]
    assert line == "BLAS: 828 GFLOP/s by 8 ranks, 100 to 107 each"
    old, new = ({"names": names, "amx": amx} for names, amx in ((["AVX2+FMA"], ""), (["AMX-BF16"], "used")))
    mixed = changed(changed(rated, range(4), features=old, cpu="A"), range(4, 8), features=new, cpu="B")
    assert [*doctor._processors(mixed)][:3] == [
        ("CPU", "A: AVX2+FMA"),
        ("CPU", "B: AMX-BF16"),
        ("", "AMX: used"),
    ]


def test_amx_and_slow_bfloat16_are_named(monkeypatch):
    monkeypatch.setattr(processor, "features", lambda: set().union(*speed.FEATURES.values()) | {"avx512bw"})
    monkeypatch.delenv("DISTGPT_AMX", raising=False)
    assert speed.cpu_features() == list(speed.FEATURES)
    for shape, wanted, words, how in (
        (AVX512_BF16, "0", "DISTGPT_AMX turns it off", "vdpbf16ps"),
        (AVX512_BF16, "1", "Linux does not grant it", "vdpbf16ps"),
        (AMX, "", "used", "AMX"),
        (AVX512, "", "not used", "in float32 arithmetic"),
    ):
        monkeypatch.setattr(processor, "shape", lambda shape=shape: shape)
        monkeypatch.setenv("DISTGPT_AMX", wanted)
        assert words in speed.amx() and how in speed.how(Bfloat16Kernels(1))
    monkeypatch.setattr(processor, "features", lambda: {"avx2"})
    assert speed.amx() == "" and speed.cpu_features() == []
