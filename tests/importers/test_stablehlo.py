"""StableHLO and Shardy text: printed forms of groups and arguments, and what is malformed."""

from __future__ import annotations

import re
import struct

import pytest

from syncopate_jax.errors import FormatError
from syncopate_jax.importers.hlo import import_hlo
from syncopate_jax.importers.program import ImportedCollective, ImportedProgram
from tests.importers.exchanges import assert_right

HEAD = "module @m attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {\n"
MESH = '  sdy.mesh @mesh = <["d"=2, "t"=2]>\n'


def program(body: str, head: str = HEAD, mesh: str = MESH) -> ImportedProgram:
    return import_hlo(
        f"{head}{mesh}  func.func public @main(%arg0: tensor<4x8xf32>, %arg1: tensor<8x6xf32>) -> "
        f'(tensor<4x8xf32> {{jax.result_info = "r"}}) {{\n{body}\n'
        f"    return %arg0 : tensor<4x8xf32>\n  }}\n}}\n"
    )


def gather(groups: str, more: str = "", out: str = "8x8") -> str:
    return (
        f'    %0 = "stablehlo.all_gather"(%arg0) <{{all_gather_dim = 0 : i64, channel_handle = '
        f"#stablehlo.channel_handle<handle = 1, type = 1>, {groups}, use_global_device_ids}}>{more}"
        f" : (tensor<4x8xf32>) -> tensor<{out}xf32>"
    )


def one(body: str) -> ImportedCollective:
    (found,) = program(body).collectives
    return found


HEX = struct.pack("<4q", 0, 2, 1, 3).hex().upper()


@pytest.mark.parametrize(
    ("groups", "wanted"),
    [
        ("replica_groups = dense<[[0, 1], [2, 3]]> : tensor<2x2xi64>", ((0, 1), (2, 3))),
        (f'replica_groups = dense<"0x{HEX}"> : tensor<2x2xi64>', ((0, 2), (1, 3))),
        ("replica_groups = #stablehlo.replica_group_mesh_axes<mesh = @mesh, axes = "
         '[#stablehlo.axis_ref<name = "d">]>', ((0, 2), (1, 3))),
        ("replica_groups = #stablehlo.replica_group_mesh_axes<mesh = #stablehlo.mesh<axes = "
         '[#stablehlo.mesh_axis<name = "x", size = 4>]>, axes = [#stablehlo.axis_ref<name = "x", '
         "sub_axis_info = (1)2>]>", ((0, 2), (1, 3))),
        ("replica_groups = #stablehlo.replica_group_mesh_axes<mesh = @mesh, axes = "
         '[#sdy<axis_ref"t">]>', ((0, 1), (2, 3))),
    ],
)  # fmt: skip
def test_printed_groups(groups: str, wanted: object) -> None:
    found = one(gather(groups))
    assert found.groups == wanted
    assert_right(found)


DENSE = "replica_groups = dense<[[0, 1], [2, 3]]> : tensor<2x2xi64>"


def test_aliases_around_the_module_and_one_device() -> None:
    head = '#loc = loc("f.py":1:1)\n' + HEAD.replace("partitions = 4", "partitions = 1")
    body = gather("replica_groups = dense<0> : tensor<1x1xi64>", out="4x8")
    found = program(body + " loc(#loc)", head=head)
    assert [one.groups for one in found.collectives] == [((0,),)]
    text = (
        f"{head}  func.func @main(%arg0: tensor<f32>) -> tensor<f32> {{\n"
        "    return %arg0 : tensor<f32>\n  }\n}\n#loc1 = loc(unknown)\n"
    )
    assert import_hlo(text).collectives == ()


def test_a_mesh_on_devices_in_another_order() -> None:
    mesh = '  sdy.mesh @mesh = <["d"=2, "t"=2], device_ids=[0, 2, 1, 3]>\n'
    body = gather(
        "replica_groups = #stablehlo.replica_group_mesh_axes<mesh = @mesh, axes = "
        '[#stablehlo.axis_ref<name = "t">]>'
    )
    (found,) = program(body, mesh=mesh).collectives
    assert found.groups == ((0, 2), (1, 3))


def test_values_of_two_regions_with_one_name() -> None:
    """The second region's %0 is its own, though the first has one, too."""
    body = (
        "    %c = stablehlo.constant dense<true> : tensor<i1>\n"
        '    %1 = "stablehlo.if"(%c) ({\n'
        "      %0 = stablehlo.dot_general %arg0, %arg1, contracting_dims = [1] x [0] : "
        "(tensor<4x8xf32>, tensor<8x6xf32>) -> tensor<4x6xf32>\n"
        "      stablehlo.return %0 : tensor<4x6xf32>\n    }, {\n"
        '      %0 = "stablehlo.custom"(%arg0) : (tensor<4x8xf32>) -> tensor<4x6xf32>\n'
        '      %2 = "stablehlo.all_reduce"(%0) <{replica_groups = dense<[[0, 1, 2, 3]]> : '
        "tensor<1x4xi64>, channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>, "
        "use_global_device_ids}> ({\n      ^bb0(%a: tensor<f32>, %b: tensor<f32>):\n"
        "        %3 = stablehlo.add %a, %b : tensor<f32>\n        stablehlo.return %3 : tensor<f32>"
        "\n      }) : (tensor<4x6xf32>) -> tensor<4x6xf32>\n"
        "      stablehlo.return %2 : tensor<4x6xf32>\n    }) : (tensor<i1>) -> tensor<4x6xf32>"
    )
    found = one(body)
    assert (found.kind, found.reduce, found.pair) == ("all_reduce", "sum", None)
    assert_right(found)


def constrained(*specs: str) -> str:
    lhs, rhs, out = (f"<@mesh, [{spec}]>" for spec in specs)
    return (
        f"    %0 = sdy.sharding_constraint %arg0 {lhs} : tensor<4x8xf32>\n"
        f"    %1 = sdy.sharding_constraint %arg1 {rhs} : tensor<8x6xf32>\n"
        "    %2 = stablehlo.dot_general %0, %1, contracting_dims = [1] x [0] : "
        "(tensor<4x8xf32>, tensor<8x6xf32>) -> tensor<4x6xf32>\n"
        f"    %3 = sdy.sharding_constraint %2 {out} : tensor<4x6xf32>"
    )


def test_contractions_between_shardings() -> None:
    found = program(constrained('{"d"}, {"t"}', '{"t"}, {}', '{"d"}, {}'))
    assert [str(derived) for _, derived in found.contractions] == ["[all_reduce out over t + dot]"]
    assert [one.operator for one in found.collectives] == ["matmul_all_reduce"]
    assert_right(found.collectives[0])


def test_a_contraction_s_own_sharding() -> None:
    own = '{sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"d"}, {}]>]>}'
    body = constrained('{"d"}, {"t"}', '{"t"}, {}', "{}, {}").splitlines()[:3]
    found = program("\n".join(body).replace("[1] x [0] :", f"[1] x [0] {own} :"))
    assert [str(derived) for _, derived in found.contractions] == ["[all_reduce out over t + dot]"]


def test_shardings_over_two_meshes_or_in_words() -> None:
    body = constrained('{"d"}, {}', "{}, {}", '{"d"}, {}')
    renamed = MESH + MESH.replace("@mesh", "@other")
    same = program(body.replace("%arg1 <@mesh", "%arg1 <@other"), mesh=renamed)
    assert [str(derived) for _, derived in same.contractions] == ["dot"]
    meshes = renamed.replace('@other = <["d"=2', '@other = <["e"=2')
    mixed = program(body.replace("%arg1 <@mesh", "%arg1 <@other"), mesh=meshes)
    assert mixed.skipped[0][1].startswith("its shardings are over meshes mesh, other, mesh")
    with_third = body.replace("%arg1 <@mesh", "%arg1 <@third")
    assert "names no mesh that is known" in program(with_third).skipped[0][1]
    words = program(body.replace('%2 <@mesh, [{"d"}, {}]>', "%2 <@mesh, everything>"))
    assert words.skipped[0][1].startswith("sharding '<@mesh, everything>' is not understood")


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (('{"d"}, {"t"}', '{"t"}, {}', '{?}, {}'), "leaves a dimension open or cuts an axis"),
        (('{"d":(1)2}, {}', '{}, {}', '{}, {}'), "leaves a dimension open or cuts an axis"),
        (('{}, {}', '{}, {}', '{}, {"d", "t"}'), "n has extent 6|has extent 6"),
        (('{"x"}, {}', '{}, {}', '{}, {}'), "has no mesh axis 'x', or has it twice; known: d"),
        (('{"d"}, {"d"}', '{}, {}', '{}, {}'), "has no mesh axis 'd', or has it twice"),
    ],
)  # fmt: skip
def test_contractions_left_alone(specs: tuple[str, str, str], message: str) -> None:
    found = program(constrained(*specs))
    assert found.contractions == ()
    (_, reason), *reshardings = found.skipped
    assert re.search(message, reason)
    assert all(name != found.skipped[0][0] for name, _ in reshardings)


def test_reshardings_left_alone() -> None:
    body = (
        "func.func public @main(%arg0: tensor<6x8xf32> {sdy.sharding = #sdy.sharding<@mesh, "
        '[{"d"}, {}]>}) -> tensor<6x8xf32> {\n'
        '    %0 = sdy.sharding_constraint %arg0 <@mesh, [{"d", "t"}, {}]> : tensor<6x8xf32>\n'
        "    return %0 : tensor<6x8xf32>\n  }\n}\n"
    )
    ((name, reason),) = import_hlo(HEAD + MESH + body).skipped
    assert reason == "its shape (6, 8) is not divisible by [2, 1] and [4, 1] ranks", name


def test_shardings_of_arguments_are_kept() -> None:
    text = (
        f"{HEAD}{MESH}  func.func public @main(%arg0: tensor<4x8xf32> {{sdy.sharding = "
        '#sdy.sharding<@mesh, [{"d"}, {}]>}) -> tensor<4x8xf32> {\n'
        "    return %arg0 : tensor<4x8xf32>\n  }\n}\n"
    )
    assert import_hlo(text).note("sharding of %arg0") == '<@mesh, [{"d"}, {}]>'


def test_a_value_that_is_returned_too_makes_no_pair() -> None:
    dot = (
        "\n    %1 = stablehlo.dot_general %0, %arg1, contracting_dims = [1] x [0] : "
        "(tensor<8x8xf32>, tensor<8x6xf32>) -> tensor<8x6xf32>"
    )
    assert one(gather(DENSE) + dot).operator == "all_gather_matmul"
    assert one(gather(DENSE) + dot + "\n    return %0 : tensor<8x8xf32>").pair is None
    read = (
        "\n    %c = stablehlo.constant dense<true> : tensor<i1>\n"
        '    %2 = "stablehlo.if"(%c) ({\n      stablehlo.return %0 : tensor<8x8xf32>\n    }, {\n'
        "      %3 = stablehlo.negate %0 : tensor<8x8xf32>\n"
        "      stablehlo.return %3 : tensor<8x8xf32>\n    }) : (tensor<i1>) -> tensor<8x8xf32>"
    )
    assert one(gather(DENSE) + dot + read).pair is None


ARGUMENTS = {
    "x": '%x: tensor<4x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"d"}, {"t"}]>}',
    "w": '%w: tensor<8x6xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"t"}, {}]>}',
    "open": "%w: tensor<8x6xf32>",
}
PRODUCT = (
    "stablehlo.dot_general {}, {}, contracting_dims = [1] x [0] : (tensor<4x8xf32>, "
    "tensor<8x6xf32>) -> tensor<4x6xf32>"
)
SUMMED = "[all_reduce out over t + dot]"
UNSAID = "the sharding of its {} is not in the text; import the partitioned HLO"


def function(
    body: str, *, weight: str = "w", result: str = '[{"d"}, {}]', more: str = ""
) -> ImportedProgram:
    sharding = f"sdy.sharding = #sdy.sharding<@mesh, {result}>" if result else ""
    return import_hlo(
        f"{HEAD}{MESH}  func.func public @main({ARGUMENTS['x']}, {ARGUMENTS[weight]}) -> "
        f'(tensor<4x6xf32> {{jax.result_info = "result[{{1,0}}]", {sharding}}}) {{\n{body}\n  }}\n'
        f"{more}}}\n"
    )


def derived(found: ImportedProgram) -> list[str]:
    return [str(one) for _, one in found.contractions]


def test_results_have_shardings_too() -> None:
    body = f"    %0 = {PRODUCT.format('%x', '%w')}\n    return %0 : tensor<4x6xf32>"
    found = function(body)
    assert (derived(found), found.skipped) == ([SUMMED], ())
    assert_right(found.collectives[0])
    assert derived(function(body, result="[{}, {}]")) == [f"{SUMMED}; all_gather out b over d"]
    for weight, result, missing in (
        ("w", "", "result"),
        ("open", '[{"d"}, {}]', "rhs"),
        ("open", "", "rhs and result"),
    ):
        silent = function(body, weight=weight, result=result)
        assert silent.contractions == silent.collectives == ()
        assert silent.skipped[0][0] == "%0"
        assert silent.skipped[0][1].startswith(UNSAID.format(missing))


CALLED = (
    "  func.func private @f(%a: tensor<4x8xf32>, %b: tensor<8x6xf32>) -> tensor<4x6xf32> {\n"
    f"    %0 = {PRODUCT.format('%a', '%b')}\n"
    '    %1 = sdy.sharding_constraint %0 <@mesh, [{"d"}, {}]> : tensor<4x6xf32>\n'
    "    return %1 : tensor<4x6xf32>\n  }\n"
)
CALL = " = func.call @f({}, %w) : (tensor<4x8xf32>, tensor<8x6xf32>) -> tensor<4x6xf32>\n"


def test_functions_get_the_shardings_that_all_calls_give_them() -> None:
    once = "    %0" + CALL.format("%x") + "    return %0 : tensor<4x6xf32>"
    assert derived(function(once, more=CALLED)) == [SUMMED]
    other = '    %1 = sdy.sharding_constraint %x <@mesh, [{}, {"t"}]> : tensor<4x8xf32>\n'
    twice = f"{other}    %2{CALL.format('%1')}{once}"
    found = function(twice, more=CALLED)
    assert found.skipped[0][1].startswith(UNSAID.format("lhs"))
    assert [one.kind for one in found.collectives] == ["all_gather"]  # of x, for the second call
    assert_right(found.collectives[0])


def test_a_function_that_calls_itself() -> None:
    itself = CALLED.replace(
        "    return", "    %2" + CALL.format("%a").replace("%w", "%b") + "    return"
    )
    assert (
        function("    return %x : tensor<4x8xf32>", more=itself)
        .skipped[0][1]
        .startswith(UNSAID.format("lhs and rhs"))
    )
    body = "    %0" + CALL.format("%x") + "    return %0 : tensor<4x6xf32>"
    assert derived(function(body, more=itself)) == [SUMMED]


def loop(step: str, after: str = "%3") -> str:
    return (
        "    %c = stablehlo.constant dense<0> : tensor<i32>\n"
        "    %0:3 = stablehlo.while(%i = %c, %a = %x, %b = %w) : tensor<i32>, tensor<4x8xf32>, "
        "tensor<8x6xf32>\n    cond {\n"
        "      %1 = stablehlo.compare LT, %i, %i, SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>"
        f"\n      stablehlo.return %1 : tensor<i1>\n    }} do {{\n{step}"
        f"      stablehlo.return %i, {after}, %b : tensor<i32>, tensor<4x8xf32>, tensor<8x6xf32>\n"
        f"    }}\n    %4 = {PRODUCT.format('%0#1', '%0#2')}\n    return %4 : tensor<4x6xf32>"
    )


def test_loops_keep_the_shardings_of_what_they_carry() -> None:
    negated = "      %3 = stablehlo.negate %a : tensor<4x8xf32>\n"
    kept = '      %3 = sdy.sharding_constraint %a <@mesh, [{"d"}, {"t"}]> : tensor<4x8xf32>\n'
    assert derived(function(loop(kept))) == [SUMMED]
    assert derived(function(loop("", "%a"))) == [SUMMED]
    assert function(loop(negated)).skipped[0][1].startswith(UNSAID.format("lhs"))
    inside = f"      %2 = {PRODUCT.format('%a', '%b')}\n"
    found = function(loop(kept + inside))
    assert [name for name, _ in found.contractions] == ["main:%4"]
    assert found.skipped[0][1].startswith(UNSAID.format("result"))


@pytest.mark.parametrize(
    ("between", "wanted"),
    [
        ("%2 = stablehlo.convert %x : tensor<4x8xf32>", True),
        ("%1:2 = stablehlo.optimization_barrier %w, %x : tensor<8x6xf32>, tensor<4x8xf32>\n"
         '    %2 = sdy.sharding_constraint %1#1 <@mesh, [{"d"}, {"t"}]> : tensor<4x8xf32>', True),
        ("%1 = stablehlo.transpose %x, dims = [1, 0] : (tensor<4x8xf32>) -> tensor<8x4xf32>\n"
         "    %2 = stablehlo.transpose %1, dims = [1, 0] : (tensor<8x4xf32>) -> tensor<4x8xf32>",
         True),
        ("%2 = stablehlo.transpose %x, dims = [0, 0] : (tensor<4x8xf32>) -> tensor<4x8xf32>",
         False),
        ("%2 = stablehlo.exponential %x : tensor<4x8xf32>", False),
        ("%c0 = stablehlo.convert %x : tensor<4x8xf32>\n"
         + "".join(f"    %c{i} = stablehlo.convert %c{i - 1} : tensor<4x8xf32>\n"
                   for i in range(1, 2000))
         + "    %2 = stablehlo.convert %c1999 : tensor<4x8xf32>", False),
    ],
    ids=["cast", "barrier", "transposes", "no transposition", "arithmetic", "too far"],
)  # fmt: skip
def test_what_keeps_a_sharding(between: str, wanted: bool) -> None:
    body = f"    {between}\n    %5 = {PRODUCT.format('%2', '%w')}\n    return %5 : tensor<4x6xf32>"
    found = function(body)
    assert derived(found) == ([SUMMED] if wanted else [])
    assert bool(found.skipped) is not wanted


def test_reshardings_before_and_after_a_contraction_are_its_moves() -> None:
    whole = '    %1 = sdy.sharding_constraint %x <@mesh, [{"d"}, {}]> : tensor<4x8xf32>\n'
    rows = (
        "    %3 = sdy.sharding_constraint %2 <@mesh, [{}, {}]> : tensor<4x6xf32>\n"
        '    %4 = sdy.sharding_constraint %3 <@mesh, [{"d", "t"}, {}]> : tensor<4x6xf32>\n'
    )
    product = f"    %2 = {PRODUCT.format('%1', '%w')}\n"
    found = function(f"{whole}{product}{rows}    return %4 : tensor<4x6xf32>", result="")
    assert derived(found) == ["[reduce_scatter out b over t + dot]"]
    assert [one.kind for one in found.collectives] == ["reduce_scatter"]
    assert_right(found.collectives[0])
    also = f"{whole}    %6 = stablehlo.negate %1 : tensor<4x8xf32>\n{product}"
    apart = function(f"{also}    return %2 : tensor<4x6xf32>")
    names = ["main:%1:all_gather.0", "main:%2:all_reduce.0"]
    assert [one.name for one in apart.collectives] == names
    for collective in apart.collectives:
        assert_right(collective)


def manual(axes: str, inner: str) -> str:
    return (
        '    %0 = sdy.manual_computation(%x, %w) in_shardings=[<@mesh, [{"d"}, {"t"}]>, <@mesh, '
        '[{"t"}, {}]>] out_shardings=[<@mesh, [{"d"}, {}]>] manual_axes={' + axes + "} "
        f"(%a: {inner.split(',')[0]}, %b: {inner.split(',')[1]}) {{\n"
        "      %1 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] : "
        f"({inner.split(',')[0]}, {inner.split(',')[1]}) -> {inner.split(',')[2]}\n"
        "      %2 = sdy.sharding_constraint %1 <@mesh, [{}, {}]> : " + inner.split(",")[2] + "\n"
        f"      sdy.return %2 : {inner.split(',')[2]}\n"
        "    } : (tensor<4x8xf32>, tensor<8x6xf32>) -> tensor<4x6xf32>\n"
        "    return %0 : tensor<4x6xf32>"
    )


def test_arrays_of_manual_computations_are_one_rank_s() -> None:
    every = function(manual('"d", "t"', "tensor<2x4xf32>,tensor<4x6xf32>,tensor<2x6xf32>"))
    assert (every.contractions, every.skipped, every.collectives) == ((), (), ())
    some = function(manual('"d"', "tensor<2x8xf32>,tensor<8x6xf32>,tensor<2x6xf32>"))
    assert derived(some) == [SUMMED]
    assert [one.groups for one in some.collectives] == [((0, 1), (2, 3))]
    assert_right(some.collectives[0])


def test_shardings_of_the_older_partitioner_are_named() -> None:
    body = f"    %0 = {PRODUCT.format('%x', '%w')}\n    return %0 : tensor<4x6xf32>"
    text = (
        f"{HEAD}  func.func public @main(%x: tensor<4x8xf32> {{mhlo.sharding = "
        '"{devices=[2,2]<=[4]}"}, %w: tensor<8x6xf32>) -> tensor<4x6xf32> {\n' + body + "\n  }\n}\n"
    )
    ((name, reason),) = import_hlo(text).skipped
    assert (name, reason[:35]) == ("mhlo.sharding", "shardings of GSPMD are not read; im")


MALFORMED = [
    ("module", "line 1, column 7: found the end of the file, needs '{' of the module"),
    ("module @m {\n", "found the end of the file, needs an operation or '}'"),
    ("module @m {\n}\n", "needs a function @main"),
    ("module @m {\n}\n}", "found '}', needs the end of the file"),
    ("module @m {\n  func.func @main() {\n    %0 = call @g() : () -> tensor<f32>\n  }\n}\n",
     "line 3, column 1: call %0 names @g, which is none"),
    ("module @m attributes {mhlo.num_partitions = 0 : i32} {\n}", "1 to 65536 replicas times"),
]  # fmt: skip
BODIES = [
    (gather(DENSE, out="9x8"), "over groups of 2 gives [8, 8], its type says [9, 8]"),
    (gather("replica_groups = dense<[[0, 1], [2, 5]]> : tensor<2x2xi64>"), "rank 5 is none of"),
    (gather("replica_groups = dense<[[0, 1], [2]]> : tensor<2x2xi64>"),
     "3 numbers do not fill 2x2"),
    (gather("replica_groups = dense<[0, 1]> : tensor<2xi64>"), "is no dense table of two"),
    (gather("replica_groups = dense<0> : tensor<999999x99999xi64>"), "are more than 65536 ranks"),
    (gather('replica_groups = dense<"0x0011"> : tensor<2x2xi64>'), "2 bytes are no 2x2 numbers"),
    (gather("none"), "stablehlo.all_gather needs replica_groups"),
    (gather("replica_groups = #stablehlo.replica_group_mesh_axes<mesh = @nomesh, axes = "
            '[#stablehlo.axis_ref<name = "t">]>'), "names no mesh; known: ['mesh']"),
    (gather("replica_groups = #stablehlo.replica_group_mesh_axes<mesh = @mesh, axes = "
            '[#stablehlo.axis_ref<name = "x">]>'), "no mesh axis 'x'; known: d, t"),
    (gather("replica_groups = #stablehlo.replica_group_mesh_axes<mesh = @mesh, axes = "
            "[#stablehlo.axis_ref<index = 3>]>"), "an axis reference is not understood"),
    (gather("replica_groups = #stablehlo.replica_group_mesh_axes<mesh = #stablehlo.mesh<axes = "
            '[#stablehlo.mesh_axis<name = "x", size = 4>], device_ids = dense<0>>, axes = '
            '[#stablehlo.axis_ref<name = "x">]>'), "devices in another order are not read"),
    ('    %0 = "stablehlo.all_to_all"(%arg0) <{split_dimension = 1 : i64, '
     f"concat_dimension = 0 : i64, split_count = 4 : i64, {DENSE}, channel_handle = "
     "#stablehlo.channel_handle<handle = 1, type = 1>}> : (tensor<4x8xf32>) -> tensor<8x4xf32>",
     "splits into 4, its groups have 2 members"),
    (gather(DENSE).replace("= 0 : i64", "= zero"), "all_gather_dim needs an integer, found 'zero'"),
    ("    %0 = stablehlo.transpose %arg0 : (tensor<4x8xf32>) -> tensor<8x4xf32>",
     "transpose needs dims = [...]"),
    ("    %0 = stablehlo.dot_general %arg0, %arg1, contracting_dims = [1] x [0]",
     "dot_general needs two operands, their types and its own"),
    (f"    %0 = {PRODUCT.format('%arg0', '%arg1, %arg1')}", "dot_general needs two operands, th"),
    ("    %0 = 5", "found '5', needs an operation or '}'"),
    ('    "stablehlo.custom"(%arg0) ({\n    } : () -> ()', "a region or ')'"),
    ('    %0 = "stablehlo.collective_permute"(%x) <{source_target_pairs = dense<[[0, 1]]> : '
     "tensor<1x2xi64>}>", "says no type of its operand"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_modules(text: str, message: str) -> None:
    with pytest.raises(FormatError, match=re.escape(message)):
        import_hlo(text)


@pytest.mark.parametrize(("body", "message"), BODIES, ids=range(len(BODIES)))
def test_malformed_bodies(body: str, message: str) -> None:
    with pytest.raises(FormatError, match=re.escape(message)):
        program(body)


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ('  sdy.mesh @mesh = <["d"=2, "d"=2]>\n', "mesh @mesh: mesh axes"),
        ('  sdy.mesh @mesh = <["d"=0]>\n', "need extents above 0"),
        ('  sdy.mesh @mesh = <["d"=2], device_ids=[1, 1]>\n', "need 2 different devices"),
    ],
)
def test_malformed_meshes(mesh: str, message: str) -> None:
    with pytest.raises(FormatError, match=re.escape(message)):
        program("", mesh=mesh)


def test_two_functions_of_one_name() -> None:
    text = (
        f"{HEAD}  func.func @f() {{\n    return\n  }}\n  func.func @f() {{\n    return\n  }}\n}}\n"
    )
    with pytest.raises(FormatError, match="another name than @f, which a function before has"):
        import_hlo(text)


@pytest.mark.parametrize(
    ("region", "reduce"),
    [
        ("%2 = stablehlo.add %a, %b : tensor<f32>", "sum"),
        ("%2 = stablehlo.maximum %b, %a : tensor<f32>", "max"),
        ('%2 = "stablehlo.add"(%a, %b) : (tensor<f32>, tensor<f32>) -> tensor<f32>', "sum"),
        ("%1 = stablehlo.add %a, %b : tensor<f32>\n"
         "      %2 = sdy.sharding_constraint %1 <@mesh, []> : tensor<f32>", "sum"),
        ("%2 = stablehlo.add %a, %a : tensor<f32>", "add then return"),
        ("%1 = stablehlo.add %a, %b : tensor<f32>\n      %2 = stablehlo.negate %1 : tensor<f32>",
         "add then negate then return"),
    ],
)  # fmt: skip
def test_reductions_are_what_their_region_does(region: str, reduce: str) -> None:
    body = (
        f'    %0 = "stablehlo.all_reduce"(%arg0) <{{{DENSE}, channel_handle = '
        "#stablehlo.channel_handle<handle = 1, type = 1>, use_global_device_ids}> ({\n"
        f"    ^bb0(%a: tensor<f32>, %b: tensor<f32>):\n      {region}\n"
        "      stablehlo.return %2 : tensor<f32>\n    }) : (tensor<4x8xf32>) -> tensor<4x8xf32>"
    )
    assert one(body).reduce == reduce
