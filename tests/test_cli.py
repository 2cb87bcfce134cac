"""The command line: each command's results, exit codes and messages."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from syncopate_jax import cli
from syncopate_jax.check.verify import verify
from syncopate_jax.commands.plan_files import read_plan
from syncopate_jax.ir import presets, serial, text, topology_json
from syncopate_jax.plans.all_gather_ring import all_gather_ring
from syncopate_jax.registry import templates

RING = ["plan", "all_gather_ring", "--ranks", "3", "--shape", "6,4"]


def run(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> tuple[int, str, str]:
    code = cli.main([str(word) for word in argv])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def shell(*argv: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "syncopate_jax", *argv],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,
    )


@pytest.fixture
def ring_file(tmp_path: Path) -> Path:
    path = tmp_path / "ring.json"
    serial.save(all_gather_ring(3, (6, 4)), path)
    return path


@pytest.fixture
def stuck_file(tmp_path: Path) -> Path:
    path = tmp_path / "stuck.txt"
    path.write_text(
        "plan stuck ranks 2\n"
        "tensor x [4] int8\n"
        "initial r0 x[0:4]\n"
        "initial r1 x[0:4]\n"
        "r0.0 push x[0:1] -> r1 x[0:1] after r1.0 on nvlink\n"
        "r1.0 push x[1:2] -> r0 x[1:2] after r0.0 on nvlink\n"
    )
    return path


class TestPlan:
    def test_prints_text(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, out, err = run(capsys, *RING)
        assert (code, err) == (0, "")
        assert out == text.to_text(all_gather_ring(3, (6, 4)))

    @pytest.mark.parametrize("flags", [["--format", "json"], ["--json"]])
    def test_prints_json(self, flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        code, out, _ = run(capsys, *RING, *flags)
        assert code == 0
        assert text.to_text(serial.from_json(out)) == text.to_text(all_gather_ring(3, (6, 4)))

    def test_writes_the_form_its_file_is_named_for(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        path = tmp_path / "p.json"
        code, out, _ = run(capsys, *RING, "--out", path)
        assert (code, out) == (0, f"{path}: all_gather_ring, 3 ranks, 6 operations\n")
        assert serial.load(path).num_ops == 6
        code, out, _ = run(capsys, *RING, "--out", tmp_path / "p.txt", "--json")
        assert json.loads(out)["operations"] == 6
        assert text.from_text((tmp_path / "p.txt").read_text()).num_ops == 6

    def test_passes_arguments_on(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, out, _ = run(
            capsys, *RING, "--split", "2", "--axis", "0", "--mode", "pull", "--dtype", "int8",
            "--channel", "nic", "--set", "shards=[3,2,1]", "--set", "name=mine",
        )  # fmt: skip
        assert code == 0
        given = {"split": 2, "axis": 0, "mode": "pull", "dtype": "int8", "channel": "nic"}
        same = all_gather_ring(3, (6, 4), **given, shards=[3, 2, 1], name="mine")
        assert out == text.to_text(same)

    def test_nested_lists_are_passed_on(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, out, err = run(
            capsys, "plan", "all_to_all_blocks", "--ranks", "2", "--shape", "3,4",
            "--set", "counts=[[1,2],[3,0]]",
        )  # fmt: skip
        assert (code, err) == (0, "")
        assert out.startswith("plan all_to_all_blocks ranks 2\n")

    def test_lists_every_template(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, out, _ = run(capsys, "plan", "--list")
        assert code == 0
        assert tuple(line.split()[0] for line in out.splitlines()) == templates.names()
        code, out, _ = run(capsys, "plan", "--list", "--json")
        assert tuple(item["name"] for item in json.loads(out)) == templates.names()
        assert all(len(item["summary"]) > 20 for item in json.loads(out))

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            ([], "plan: needs TEMPLATE, --ranks, --shape; plan --list shows the templates, and"),
            (["all_gather_ring", "--ranks", "2"], "plan: needs --shape;"),
            (["nonsense", "--ranks", "2", "--shape", "4"], "no plan template is called 'nonsense'"),
            ([*RING[1:], "--shape", "6,-4"], "--shape '6,-4': needs integers of 0 to 2147483647"),
            ([*RING[1:], "--shape", ""], "--shape '': needs integers separated by commas, such as"),
            ([*RING[1:], "--shape", "64,x"], "--shape '64,x': needs integers separated by commas"),
            ([*RING[1:], "--shape", "9" * 5000], "99…': needs integers of 0 to 2147483647, found"),
            (
                [*RING[1:], "--shape", "999999999996"],
                "needs integers of 0 to 2147483647, found 999999999996",
            ),
            ([*RING[1:], "--out", "/dev/full"], "/dev/full: No space left on device"),
            ([*RING[1:], "--set", "split"], "--set 'split' must be KEY=VALUE"),
            ([*RING[1:], "--set", "colour=1"], "has no argument 'colour'; it takes dtype, axis,"),
            ([*RING[1:], "--set", "num_ranks=1"], "has no argument 'num_ranks'"),
            (
                [*RING[1:], "--set", "split=two"],
                "argument split must be int, such as --set split=2, found 'two'",
            ),
            (
                [*RING[1:], "--set", "split=true"],
                "argument split must be int, such as --set split=2, found True",
            ),
            (
                [*RING[1:], "--set", "split=NaN"],
                "argument split must be int, such as --set split=2, found nan",
            ),
            (
                [*RING[1:], "--set", "split=null"],
                "argument split must be int, such as --set split=2, found None",
            ),
            ([*RING[1:], "--set", 'shards=[1,"a"]'], "argument shards must be Sequence[int]"),
            ([*RING[1:], "--set", "shards={}"], "argument shards must be Sequence[int]"),
            ([*RING[1:], "--split", "0"], "all_gather_ring: split must be in 1.."),
            ([*RING[1:], "--ranks", "0"], "all_gather_ring: num_ranks must be in 1.."),
            ([*RING[1:], "--axis", "7"], "axis 7 is not an axis of shape (6, 4)"),
            ([*RING[1:], "--mode", "throw"], "mode 'throw' is not one of push, pull"),
            ([*RING[1:], "--dtype", "int3"], "dtype 'int3' is not one of"),
            ([*RING[1:], "--out", "/no/such/folder/p.json"], "p.json: No such file or directory"),
        ],
    )
    def test_bad_usage(
        self, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        code, out, err = run(capsys, "plan", *flags)
        assert (code, out) == (2, "")
        assert err.startswith("syncopate plan: error: ")
        assert message in err


class TestVerify:
    def test_quotes_no_more_of_a_file_than_can_be_read(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        (tmp_path / "junk").write_text("plan a ranks 2\n" + "z" * 100_000)
        code, _, err = run(capsys, "verify", tmp_path / "junk")
        assert code == 2 and "line 2: found 'zzz" in err and len(err) < 1000

    @pytest.mark.parametrize("form", ["json", "text"])
    def test_proves(self, form: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        run(capsys, *RING, "--format", form, "--out", tmp_path / "p")
        code, out, err = run(capsys, "verify", tmp_path / "p")
        assert (code, err) == (0, "")
        assert out == "all_gather_ring: proven, 3 ranks, 6 operations\n"

    def test_prints_a_finding_a_line(
        self, capsys: pytest.CaptureFixture[str], stuck_file: Path
    ) -> None:
        code, out, err = run(capsys, "verify", stuck_file)
        findings = verify(read_plan(str(stuck_file)))
        assert (code, err) == (1, "")
        assert findings
        assert out.splitlines() == [str(finding) for finding in findings]

    def test_json(
        self, capsys: pytest.CaptureFixture[str], ring_file: Path, stuck_file: Path
    ) -> None:
        code, out, _ = run(capsys, "verify", ring_file, "--json")
        assert (code, json.loads(out)) == (
            0,
            {"plan": "all_gather_ring", "proven": True, "findings": []},
        )
        code, out, _ = run(capsys, "verify", stuck_file, "--json")
        found = json.loads(out)
        assert (code, found["proven"]) == (1, False)
        assert found["findings"][0].keys() == {"code", "rank", "index", "message"}

    def test_reads_standard_input(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        raw = text.to_text(all_gather_ring(3, (6, 4))).encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
        code, out, _ = run(capsys, "verify", "-")
        assert (code, out) == (0, "all_gather_ring: proven, 3 ranks, 6 operations\n")

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "plan file: is empty"),
            (b" \n\t", "plan file: is empty"),
            (b"\xff\xfe\x00\x01", "plan file: is not UTF-8"),
            (b"{", "is not JSON"),
            (b"{" * 100000, "is not JSON"),
            (b'{"a":' * 100000, "nested too deep"),
            (b"{}", "the file: found no 'format'"),
            (b"\x00", "line 1"),
            (b"hello", "line 1"),
            (b"plan p ranks 0", "line 1: found 0 ranks, needs 1 to"),
            (b"plan p ranks 2\nr0.0 push x[0:1] -> r1 x[0:1] on nvlink\n", "line 2"),
        ],
    )
    def test_malformed_files(
        self, content: bytes, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        path = tmp_path / "bad"
        path.write_bytes(content)
        for command in (["verify"], ["simulate", "--topology", "h200"]):
            code, out, err = run(capsys, *command, path)
            assert (code, out) == (2, "")
            assert err.startswith(f"syncopate {command[0]}: error: {path}: ")
            assert message in err

    def test_missing_file_and_folder(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        code, _, err = run(capsys, "verify", tmp_path / "none")
        assert code == 2
        assert err == f"syncopate verify: error: {tmp_path / 'none'}: No such file or directory\n"
        code, _, err = run(capsys, "verify", tmp_path)
        assert code == 2
        assert err == f"syncopate verify: error: {tmp_path}: Is a directory\n"


class TestSimulate:
    def test_reports(self, capsys: pytest.CaptureFixture[str], ring_file: Path) -> None:
        code, out, err = run(capsys, "simulate", ring_file, "--topology", "h200")
        assert (code, err) == (0, "")
        lines = out.splitlines()
        assert lines[0] == (
            "all_gather_ring on h200_nvlink: 26.00 us, 3 ranks, 6 operations, 96 bytes"
        )
        assert lines[2] == "critical path, the last 2 of 2 steps:"

    def test_json(self, capsys: pytest.CaptureFixture[str], ring_file: Path) -> None:
        code, out, _ = run(capsys, "simulate", ring_file, "--topology", "ring", "--json")
        found = json.loads(out)
        assert code == 0
        assert found["topology"] == "ring_3"
        assert found["makespan"] == pytest.approx(26e-6, rel=1e-3)

    def test_takes_a_stored_topology(
        self, capsys: pytest.CaptureFixture[str], ring_file: Path, tmp_path: Path
    ) -> None:
        topology_json.save(presets.ring(3, bandwidth=16e6, overhead=0), tmp_path / "t.json")
        argv = ("simulate", ring_file, "--topology", tmp_path / "t.json", "--json")
        code, out, _ = run(capsys, *argv)
        assert code == 0
        assert json.loads(out)["makespan"] == pytest.approx(2 * (16 / 16e6 + 11e-6))

    def test_draws_and_traces(
        self, capsys: pytest.CaptureFixture[str], ring_file: Path, tmp_path: Path
    ) -> None:
        code, _, err = run(
            capsys, "simulate", ring_file, "--topology", "h200",
            "--picture", tmp_path / "p.svg", "--trace", tmp_path / "t.json",
        )  # fmt: skip
        assert (code, err) == (0, "")
        assert (tmp_path / "p.svg").read_text().startswith("<svg")
        assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]

    def test_deadlock_is_a_no(self, capsys: pytest.CaptureFixture[str], stuck_file: Path) -> None:
        code, out, err = run(capsys, "simulate", stuck_file, "--topology", "h200")
        assert (code, out) == (1, "")
        assert "rank 0 op 0 (nvlink) waits for rank 1 op 0" in err

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (
                ["--topology", "tpu"],
                "no topology preset is called 'tpu'; known: h100, h200, h200_measured, pcie",
            ),
            (["--topology", "nodes:2x2"], "has 4 ranks, the plan has 3"),
            (["--topology", "gone.json"], "gone.json: No such file or directory"),
            (
                ["--topology", "h200", "--picture", "p.gif"],
                "needs a name that ends in .svg or .png",
            ),
            (["--topology", "h200", "--trace", "/no/such/t"], "/no/such/t: No such file"),
        ],
    )
    def test_bad_usage(
        self,
        flags: list[str],
        message: str,
        capsys: pytest.CaptureFixture[str],
        ring_file: Path,
    ) -> None:
        code, out, err = run(capsys, "simulate", ring_file, *flags)
        assert (code, out) == (2, "")
        assert err.startswith("syncopate simulate: error: ")
        assert message in err

    def test_topology_of_other_size(
        self, capsys: pytest.CaptureFixture[str], ring_file: Path, tmp_path: Path
    ) -> None:
        topology_json.save(presets.h200_nvlink(2), tmp_path / "t.json")
        code, _, err = run(capsys, "simulate", ring_file, "--topology", tmp_path / "t.json")
        assert code == 2
        assert "topology h200_nvlink has 2 ranks, the plan has 3" in err

    def test_collectives_are_expanded(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        argv = ("plan", "collective", "--ranks", "2", "--shape", "4", "--out", tmp_path / "c")
        assert run(capsys, *argv)[0] == 0
        code, out, err = run(capsys, "simulate", tmp_path / "c", "--topology", "h200")
        assert (code, err) == (0, "collectives were expanded into their templates' transfers\n")
        assert out.startswith("collective on h200_nvlink: 13.00 us, 2 ranks, 2 operations")


class TestUsage:
    @pytest.mark.parametrize(
        "argv",
        [[], ["fly"], ["verify"], ["simulate", "x"], ["plan", "--ranks", "two"], ["--colour"]],
    )
    def test_bad_usage_is_two(self, argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        code, out, err = run(capsys, *argv)
        assert (code, out) == (2, "")
        assert err.startswith("usage: syncopate")

    def test_help_lists_every_command(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, out, _ = run(capsys, "--help")
        assert code == 0
        words = " ".join(out.split())  # lines are broken to the width of the terminal
        assert all(f"{command.name} {command.help}" in words for command in cli.COMMANDS)

    def test_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        code, out, _ = run(capsys, "--version")
        assert (code, out.split()[0]) == (0, "syncopate-jax")

    @pytest.mark.parametrize(
        ("error", "code", "message"),
        [
            (KeyboardInterrupt(), 130, "interrupted"),
            (MemoryError(), 2, "not enough memory"),
            (OSError("odd"), 2, "odd"),
        ],
    )
    def test_what_stops_a_command(
        self,
        error: BaseException,
        code: int,
        message: str,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
        ring_file: Path,
    ) -> None:
        def stop(plan: object) -> None:
            raise error

        monkeypatch.setattr("syncopate_jax.commands.verify.verify", stop)
        assert run(capsys, "verify", ring_file) == (
            code,
            "",
            f"syncopate verify: error: {message}\n",
        )


class TestProcess:
    """In a process of its own, as scripts run it."""

    def test_pipeline(self) -> None:
        plan = shell(*RING)
        assert (plan.returncode, plan.stderr) == (0, "")
        found = shell("verify", "-", input=plan.stdout)
        assert (found.returncode, found.stdout) == (
            0,
            "all_gather_ring: proven, 3 ranks, 6 operations\n",
        )

    def test_errors_go_to_stderr(self) -> None:
        found = shell("verify", "gone")
        assert (found.returncode, found.stdout) == (2, "")
        assert found.stderr == "syncopate verify: error: gone: No such file or directory\n"

    def test_needs_no_jax(self, tmp_path: Path) -> None:
        (tmp_path / "jax.py").write_text("raise RuntimeError('JAX was imported')\n")
        environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
        assert shell(*RING, env=environ).returncode == 0
        assert shell("plan", "--list", env=environ).returncode == 0

    def test_a_reader_that_leaves_is_no_error(self) -> None:
        command = [sys.executable, "-m", "syncopate_jax", *RING[:2], "--ranks", "64"]
        # Unbuffered, Python itself drops the rest of a write that the reader cut short.
        environ = {key: os.environ[key] for key in os.environ if key != "PYTHONUNBUFFERED"}
        found = subprocess.Popen(
            [*command, "--shape", "6400,4"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environ,
        )
        assert found.stdout is not None and found.stderr is not None
        assert found.stdout.readline().startswith(b"plan all_gather_ring")
        found.stdout.close()
        assert found.stderr.read() == b""
        assert found.wait(timeout=60) == 141

    def test_interrupt_leaves_no_traceback(self, tmp_path: Path) -> None:
        fifo = tmp_path / "fifo"
        os.mkfifo(fifo)
        # A shell's background job ignores the signal, and hands that on to its children.
        found = subprocess.Popen(
            [sys.executable, "-m", "syncopate_jax", "verify", str(fifo)],
            stderr=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        # It opens the fifo once it is up; the writer's end then opens too, and stays silent.
        with open(fifo, "wb"):
            time.sleep(0.2)
            found.send_signal(signal.SIGINT)
            _, err = found.communicate(timeout=60)
        assert found.returncode == 130
        assert err == b"syncopate verify: error: interrupted\n"

    def test_ascii_output_does_not_fail(self) -> None:
        environ = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
        found = shell(*RING, "--set", 'name="gr\u00fc\u00dfe"', env=environ)
        assert (found.returncode, found.stderr) == (0, "")
