"""Rewritten kernels: their texts as goldens, that Triton compiles them for Hopper, and refusals."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from syncopate_jax.backends.triton_call import Launched
from syncopate_jax.backends.triton_ordered import OrderedTriton
from syncopate_jax.errors import FormatError, UnsupportedError
from syncopate_jax.ir.build import build_plan
from syncopate_jax.ir.chunk import Box
from syncopate_jax.ir.comm import P2P, ComputeDep
from syncopate_jax.ir.plan import Goal, Plan, Region, Tensor
from syncopate_jax.kernel import directives_tree
from syncopate_jax.kernel.local import PallasKernel
from syncopate_jax.pallas_kernels import contraction_triton, matmul_triton
from syncopate_jax.pallas_kernels.matmul_triton import MatmulConfig
from syncopate_jax.triton_source import module, rewrite
from syncopate_jax.triton_source.scheme import (
    Addends,
    Columns,
    Lists,
    Read,
    Runs,
    Scheme,
    Spot,
)
from syncopate_jax.triton_source.text import Text, fitted
from tests.golden.compare import golden
from tests.kernel.test_directives import KERNEL, PERSISTENT
from tests.triton_source import foreign
from tests.triton_source.works import WORKS, M, N, fused, gather, parameters, part, persistent


@pytest.mark.parametrize("name", WORKS)
def test_texts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = fused(name, monkeypatch)
    text = kernel.text(*parameters(kernel))
    assert text == golden(f"triton/{name}.py.txt", text)
    tree = ast.parse(text)
    assert "Made by syncopate_jax (rewriter" in (ast.get_docstring(tree) or "")
    mine = [line for line in text.splitlines() if "sync." in line and len(line) > 100]
    assert not mine


def test_a_folded_text(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = fused("matmul_waits_and_signals", monkeypatch, folded=True)
    text = kernel.text(*parameters(kernel), frozenset({"w_ptr"}))
    assert text == golden("triton/matmul_waits_and_signals_folded.py.txt", text)
    assert "W_SIZE" not in text and "X_SIZE" in text  # w is shared, x is not


@pytest.mark.parametrize("name", WORKS)
def test_the_users_statements_are_printed_as_they_were_written(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but those of dispatch, which the table replaces, in whatever names and indentation."""
    kernel = fused(name, monkeypatch)
    source = kernel.work.kernel.triton_body.source
    dispatched = set(assignments(source.dispatch.inside))
    wanted = [s for s in assignments([source.function]) if s not in dispatched]
    assert set(wanted) <= set(assignments([ast.parse(kernel.text(*parameters(kernel)))]))


def assignments(nodes: Any) -> list[str]:
    """Every assignment, as text; names that are new for the rewritten kernel as they were."""
    inner = [node for top in nodes for node in ast.walk(top)]
    found = [ast.unparse(n) for n in inner if isinstance(n, ast.Assign | ast.AugAssign)]
    return [text.replace("_here", "") for text in found]


@pytest.mark.parametrize(
    "name", ["matmul_waits", "matmul_waits_and_signals", "attention_loads_from_peers"]
)
@pytest.mark.parametrize("folded", [False, True])
def test_triton_compiles_them_for_hopper(
    name: str, folded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ptx = compiled(name, folded, monkeypatch).asm["ptx"]
    waits, signals = r"(ld|atom)[.\w]*acquire", r"(atom|red)[.\w]*release"
    for pattern in (waits, signals):
        assert bool(re.search(pattern, ptx)) == ("loads_from_peers" not in name)


@pytest.mark.slow
@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("name", WORKS)
def test_triton_compiles_all_for_hopper(
    name: str, folded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if folded and WORKS[name][-1] == "copy_engine":
        pytest.skip("the copy engine copies between devices")
    assert len(compiled(name, folded, monkeypatch).asm["cubin"]) > 1000


def compiled(name: str, folded: bool, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What Triton makes of a work for compute capability 9.0; needs no GPU."""
    kernel = fused(name, monkeypatch, folded)
    return hopper(kernel.launched(*parameters(kernel), frozenset()), "fp32")


def hopper(launched: Launched, dtype: str) -> Any:
    """What Triton makes of a launch for compute capability 9.0; ``dtype`` of operands."""
    whole = ("table_ptr", "peers_ptr", "counters_ptr", "token_ptr")
    signature = {n: "*i32" if n in whole else f"*{dtype}" for n in launched.order}
    signature |= {n: "constexpr" for n, _ in launched.arguments}
    attributes = {(i,): [["tt.divisibility", 16]] for i in range(len(launched.order))}
    function = getattr(launched.load(), launched.name)
    source = ASTSource(function, signature, dict(launched.arguments), attributes)
    options = {"num_warps": launched.num_warps, "num_stages": launched.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


# --- what cannot be rewritten ------------------------------------------------------------------

SCHEME = Scheme(
    title="a test",
    ranks=1,
    folded=False,
    tiles=4,
    workers=2,
    table=9,
    slots=1,
    parameters=("x_ptr", "y_ptr", "table_ptr", "peers_ptr", "counters_ptr"),
    arrays=(),
    order=Columns(0, (1, 1)),
)


def rewritten(text: str, scheme: Scheme = SCHEME) -> str:
    return rewrite.rewrite(directives_tree.read_source(text.lstrip("\n"), "k.py", 7), scheme)


def test_the_loop_of_a_persistent_kernel_keeps_its_options() -> None:
    text = rewritten(PERSISTENT, replace(SCHEME, order=Columns(0, (1,))))
    assert "for position in tl.range(program, TILES, WORKERS, num_stages=2):" in text


def test_a_flat_loop_stays_so_where_nobody_waits_for_its_tiles() -> None:
    """It waits for the next tile before it stores this one, and may have no other loop in it."""
    text = PERSISTENT.replace("num_stages=2", "flatten=True")
    scheme = replace(SCHEME, order=Columns(0, (1,)), waits=Lists(0, Columns(4, (1, 1)), True))
    head = "for position in tl.range(program, TILES, WORKERS, flatten=True):"
    assert head in rewritten(text, scheme)
    scheme = replace(scheme, signals=Lists(0, Columns(4, (1, 1))))
    with pytest.raises(UnsupportedError, match=r"k.py:7: .* no epilogue directive says"):
        rewritten(text, scheme)
    store = "tl.store(y_ptr + block, tl.load(x_ptr + block))"
    marked = "# syncopate: epilogue x\n{0}{1}\n{0}# syncopate: end epilogue".format(" " * 8, store)
    marked = f"x = tl.load(x_ptr + block)\n        {marked}".replace(
        "tl.load(x_ptr + block))", "x)"
    )
    assert head.replace(", flatten=True", "") in rewritten(text.replace(store, marked), scheme)


def test_what_the_copy_unit_stored_is_there_before_a_signal() -> None:
    source = directives_tree.read(MatmulConfig(described=True).kernel)
    arrays = ("x_ptr", "w_ptr", *SCHEME.parameters[1:])
    scheme = replace(SCHEME, parameters=arrays, signals=Lists(2, Columns(4, (1, 1))))
    lines = [line.strip() for line in rewrite.rewrite(source, scheme).splitlines()]
    assert lines[lines.index("sync.signal_all(") - 1] == "sync.stored()"


@pytest.mark.parametrize(
    ("line", "fenced", "stored"),
    [
        ("total += language.load(x_ptr)", False, False),
        ("blocks = language.make_tensor_descriptor(x_ptr, [1], [1], [1])", True, False),
        ("total += given.load([0])", True, False),
        ("put(total, 3)", False, True),
    ],
)
def test_the_copy_unit_is_seen_under_other_names_and_in_helpers(
    line: str, fenced: bool, stored: bool
) -> None:
    text = KERNEL.lstrip("\n").replace("    total = 0.0\n", f"    total = 0.0\n    {line}\n")
    known = {"language": triton.language, "put": put, "tl": triton.language}
    source = directives_tree.read_source(text, "k.py", 7, known)
    lists = Lists(0, Columns(4, (1, 1)))
    found = rewrite.rewrite(source, replace(SCHEME, waits=lists, signals=lists))
    assert f"FENCED={fenced})" in found and ("sync.stored()" in found) == stored


def put(blocks: Any, value: Any) -> None:
    """A helper, as a kernel calls one."""
    blocks.store([0], value)


def test_a_loop_of_another_name_keeps_it() -> None:
    text = PERSISTENT.lstrip("\n").replace("tl.", "language.")
    known = {"language": triton.language}
    source = directives_tree.read_source(text, "k.py", 7, known)
    found = rewrite.rewrite(source, replace(SCHEME, order=Columns(0, (1,))))
    assert "for position in language.range(program, TILES, WORKERS, num_stages=2):" in found


def test_a_static_loop_over_steps_becomes_one_that_is_not() -> None:
    text = KERNEL.lstrip("\n").replace("range(tl.cdiv", "steps(tl.cdiv")
    source = directives_tree.read_source(text, "k.py", 7, {"steps": triton.language.static_range})
    assert "for step in tl.range(run_first, tl.minimum(" in rewrite.rewrite(source, BY_RUN)


def test_a_counter_of_tiles_beside_the_loops_is_refused() -> None:
    """As one way of writing the tutorial has it, which stores by a counter of its own."""
    function = directives_tree.plain_function(foreign.tutorial_persistent_matmul)
    text, head = inspect.getsource(function), "    # syncopate: tiles persistent\n"
    store = "        # syncopate: epilogue accumulator\n"
    assert head in text and store in text
    text = text.replace(head, f"    tile_id_c = start_pid - NUM_SMS\n{head}").replace(
        store,
        "        tile_id_c += NUM_SMS\n"
        "        pid_m, pid_n = _compute_pid(tile_id_c, num_pid_in_group, num_pid_m, 8)\n"
        f"{store}",
    )
    line = text[: text.index("tile_id_c += ")].count("\n") + 1
    with pytest.raises(
        FormatError, match=rf"^k.py:{line}: tile_id_c follows from the program's nu"
    ):
        directives_tree.read_source(text, "k.py", 1, function.__globals__)


PIPELINED = {
    "pointers": MatmulConfig(flat=False, num_stages=4),
    "pointers, flat": MatmulConfig(),
    "descriptors": MatmulConfig(described=True, flat=False, num_stages=4),
    "descriptors, flat": MatmulConfig(described=True, num_stages=4),
    "late": MatmulConfig(described=True, late=2),
}


@pytest.mark.parametrize("config", PIPELINED.values(), ids=PIPELINED.keys())
def test_a_product_in_order_behind_flags_is_pipelined(config: MatmulConfig) -> None:
    """Products overlap, flat loops are one loop, and nothing spills or exceeds a Hopper block."""
    kernel = matmul_triton.matmul(1024, 512, 1024, "bfloat16", config, 8)
    order = np.stack(np.unravel_index(np.arange(32), (8, 4)), axis=-1)
    ordered = OrderedTriton(kernel, order, order[:, 0], 8)
    found = hopper(ordered.launched(*in_order(ordered)), "bf16")
    assert found.metadata.shared <= 227 * 1024
    assert re.findall(r"warp_group_dot_wait[^\n]*pendings = (\d)", found.asm["ttgir"])[0] == "1"
    assert found.asm["ttgir"].count("scf.for") == (1 if config.flat else 2)
    assert found.asm["ptx"].count("ld.acquire.sys") >= 1
    if config.late:  # bands are stored before the tile that they make room for is rounded
        steps = found.asm["ttgir"].split("warp_group_dot ")[0]
        assert steps.count("async_tma_copy_local_to_global") == 4


def test_a_tile_that_is_stored_late_is_not_signalled() -> None:
    source = directives_tree.read(MatmulConfig(described=True, late=2).kernel)
    arrays = ("x_ptr", "w_ptr", *SCHEME.parameters[1:])
    scheme = replace(SCHEME, parameters=arrays, signals=Lists(2, Columns(4, (1, 1))))
    with pytest.raises(UnsupportedError, match="no epilogue directive says where it stores them"):
        rewrite.rewrite(source, scheme)


@pytest.mark.parametrize("backend", ["ldst_dedicated", "ldst_colocated"])
@pytest.mark.parametrize("kind", ["product", "contraction"])
def test_operands_of_peers_are_loaded_asynchronously(
    kind: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 bytes at a time: what is known of the alignment of an address is kept."""
    made, operand = {"product": (large, "x"), "contraction": (large_contraction, "lhs")}[kind]
    shape = (1024, 512) if kind == "product" else (2, 512, 512)
    plan = functools.partial(gather, 0, "bfloat16", x=shape)
    monkeypatch.setitem(WORKS, "large", (made, plan, {"x": operand}, backend))
    kernel = fused("large", monkeypatch)
    found = hopper(kernel.launched(*parameters(kernel), frozenset()), "bf16")
    assert re.findall(r"warp_group_dot_wait[^\n]*pendings = (\d)", found.asm["ttgir"])[0] == "1"
    assert "cp.async.cg" in found.asm["ptx"] and "cp.async.ca" not in found.asm["ptx"]
    assert found.metadata.shared <= 227 * 1024
    if backend == "ldst_colocated":  # no programs that copy: tiles and steps alone are a loop
        assert found.asm["ttgir"].count("scf.for") == 1


def large() -> PallasKernel:
    return matmul_triton.matmul(1024, 512, 1024, "bfloat16", PIPELINED["pointers, flat"], 4)


def large_contraction() -> PallasKernel:
    return contraction_triton.contraction(
        "Gmk", "kn", "Gmn", {"G": 2, "m": 512, "k": 512, "n": 1024},
        tiles={"m": 128, "n": 256, "k": 64}, dtype="bfloat16", out_dtype="bfloat16",
    )  # fmt: skip


def test_a_persistent_tile_is_stored_at_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that only its reduction loop assigns, of which Triton knows nothing after it."""
    monkeypatch.setitem(WORKS, "spread", (persistent, spread, {"y": "y"}, "ldst_colocated"))
    text = fused("spread", monkeypatch).text(*parameters(fused("spread", monkeypatch)))
    assert "for place in range(" in text and "_again" not in text
    assert len(compiled("spread", True, monkeypatch).asm["cubin"]) > 1000


def spread() -> Plan:
    """Every rank computes its rows of y and stores them at both."""
    whole, ranks = Box.full((2 * M, N)), range(2)
    own = [part("y", whole.shape, 0, rank) for rank in ranks]
    ops = [[P2P(r, r, 1 - r, own[r], own[r], (ComputeDep(r, own[r]),))] for r in ranks]
    starts = [Region(r, "y", own[r].box, produced=True) for r in ranks]
    goals = [Goal(r, "y", whole) for r in ranks]
    return build_plan("spread", 2, [Tensor("y", whole.shape, "float32")], starts, goals, ops)


def in_order(ordered: OrderedTriton) -> tuple[Scheme, tuple[str, ...], tuple[str, ...]]:
    inputs = ("x_ptr", "w_ptr", "table_ptr", "peers_ptr", "counters_ptr")
    return ordered.table_and_scheme()[1], inputs, ("y_ptr",)


BY_RUN = replace(
    SCHEME,
    reads=(Read("x_ptr", (Spot("x_ptr"), Spot("x_ptr")), Columns(3, (1, 0, 1)), True, False),),
    runs=Runs(2, Columns(5, (1, 1)), None),
)


def test_addresses_that_are_made_before_the_tiles_are_refused() -> None:
    text = PERSISTENT.replace(
        "    # syncopate: tiles persistent\n",
        "    # syncopate: tiles persistent\n    p = x_ptr + 1\n",
    ).replace("tl.load(x_ptr", "tl.load(p")
    scheme = replace(
        SCHEME,
        order=Columns(0, (1,)),
        reads=(Read("x_ptr", (Spot("x_ptr"),), Columns(3, (0, 0, 1))),),
    )
    with pytest.raises(UnsupportedError, match=r"k.py:17: p is made of x_ptr before the loop over"):
        rewritten(text, scheme)


def test_partial_results_need_one_store() -> None:
    text = KERNEL.replace(
        "    tl.store(y_ptr + row, total)\n", "    tl.store(y_ptr + row, total)\n" * 2
    )
    addends = Addends("y_ptr", "y_landing_ptr", Lists(3, Columns(5, (1,))))
    with pytest.raises(UnsupportedError, match=r"epilogue stores y_ptr once, it stores 2 times"):
        rewritten(text, replace(SCHEME, addends=addends))
    assert "total += tl.load(addend_ptr + row)" in rewritten(
        KERNEL, replace(SCHEME, addends=addends)
    )


def test_addresses_that_a_loop_advances_are_set_for_each_run() -> None:
    text = KERNEL.replace("    total = 0.0\n", "    total = 0.0\n    ptrs = x_ptr + row\n")
    text = text.replace("tl.load(x_ptr + row + column + step)", "tl.load(ptrs)\n        ptrs += 4")
    assert "ptrs = ptrs_start + run_first * (4) + sync.apart(" in rewritten(text, BY_RUN)
    with pytest.raises(UnsupportedError, match="changes the address ptrs by other than a constant"):
        rewritten(text.replace("ptrs += 4", "ptrs += step"), BY_RUN)


def test_addresses_that_a_loop_only_reads_are_shifted() -> None:
    text = KERNEL.replace("    total = 0.0\n", "    total = 0.0\n    ptrs = x_ptr + row\n")
    found = rewritten(text.replace("tl.load(x_ptr + row", "tl.load(ptrs"), BY_RUN)
    assert "ptrs_here = ptrs + sync.apart(" in found and "tl.load(ptrs_here" in found


def test_a_loop_over_elements_runs_over_elements() -> None:
    text = KERNEL.replace("range(tl.cdiv(DEPTH, BLOCK))", "range(0, DEPTH, BLOCK)")
    wanted = "range(run_first * (BLOCK), tl.minimum(run_last * (BLOCK), DEPTH), BLOCK):"
    assert wanted in rewritten(text, BY_RUN)


def test_statements_on_one_line_are_rewritten_too() -> None:
    text = PERSISTENT.replace("tl.store(", "a = 1; tl.store(")
    assert "        a = 1\n        tl.store(" in rewritten(
        text, replace(SCHEME, order=Columns(0, (1,)))
    )


LESS_INDENTED = {
    "a comment": ("        total +=", "# why\n        total +="),
    "a line that goes on": ("tl.load(x_ptr + row + column + step)", "tl.load(x_ptr\n + row)"),
    "a line that ends in a backslash": ("total += tl.load(", "total += \\\n  tl.load("),
    "a docstring": ('with one of each directive."""', 'with\n\n  one of each."""'),
    "a string": ("    total = 0.0\n", '    total = """\n  a\n        b"""\n'),
    "a text with a value": ("    total = 0.0\n", '    total = f"""\n {row}"""\n'),
}


@pytest.mark.parametrize("case", LESS_INDENTED.values(), ids=LESS_INDENTED.keys())
def test_lines_indented_less_than_their_statement_are_moved_with_it(case: tuple[str, str]) -> None:
    """Their meaning stays the same: of strings too, whose lines are not moved."""
    assert case[0] in KERNEL
    text = KERNEL.replace(*case)
    (function,) = ast.parse(text).body
    kept = [s for s in assignments([function]) if "pid" not in s and "blocks" not in s]
    found = assignments([ast.parse(rewritten(text))])
    assert kept and set(kept) <= set(found)


def test_what_does_not_parse_is_refused_before_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Text, "statements", lambda *_: ["total = = 1"])
    message = (
        r"k.py:7: kernel scaled: what is made of it does not parse, .* at 'total = = 1'; write"
    )
    with pytest.raises(UnsupportedError, match=message):
        rewritten(KERNEL)


def test_long_lines_are_split_at_their_call() -> None:
    line = "    total = combine(" + ", ".join(f"argument_{i}" for i in range(9)) + ") + 1"
    found = fitted(line)
    assert ast.dump(ast.parse("\n".join(found).strip())) == ast.dump(ast.parse(line.strip()))
    assert max(map(len, found)) <= 100
    assert fitted("    # " + "long " * 30) == ["    # " + "long " * 30]


# --- modules -----------------------------------------------------------------------------------


@pytest.fixture
def dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(module.FOLDER, str(tmp_path / "new"))
    return tmp_path / "new"


def test_texts_are_kept_by_content(dump: Path) -> None:
    first, again = module.save("k", "A = 1\n"), module.save("k", "A = 1\n")
    other = module.save("k", "A = 2\n")
    assert first == again != other and sorted(dump.iterdir()) == sorted([first, other])
    assert module.load(other, {"B": 3, "__name__": "hidden"}).A == 2
    assert module.load(first, {"A": 5, "B": 3}).A == 1


def test_a_text_is_loaded_once_for_the_same_names(dump: Path) -> None:
    """As Triton's caches are its functions' own; what the text does not name is all the same."""
    path, helper = module.save("k", "def k(): return helper()\n"), lambda: 1
    first = module.load(path, {"helper": helper, "other": 1})
    count = len(sys.modules)
    assert module.load(path, {"helper": helper, "other": 2}) is first and first.k() == 1
    assert len(sys.modules) == count
    assert module.load(path, {"helper": lambda: 2}).k() == 2 and first.k() == 1
    assert module.load(path, {"helper": helper}) is first
    assert module.made(path, {"helper": helper}) is not first


def test_threads_may_keep_one_text_at_once(dump: Path) -> None:
    text = "A = 1\n" * 1000
    with ThreadPoolExecutor(8) as pool:
        paths = set(pool.map(lambda _: module.save("k", text), range(64)))
    assert [path.read_text() for path in paths] == [text]
    assert set(dump.iterdir()) == paths


def test_a_cache_that_cannot_be_written_is_named(dump: Path) -> None:
    dump.write_text("a file, and no folder")
    message = (
        r"kernel k, rewritten, cannot be kept in a file.*new.*; set SYNCOPATE_TRITON_DUMP to a"
    )
    with pytest.raises(UnsupportedError, match=message):
        module.save("k", "A = 1\n")


def test_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(module.FOLDER, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert module.folder() == tmp_path / "syncopate_jax" / "triton"
