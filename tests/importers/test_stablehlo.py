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
    meshes = MESH + MESH.replace("@mesh", "@other")
    mixed = program(body.replace("%arg1 <@mesh", "%arg1 <@other"), mesh=meshes)
    assert mixed.skipped[0][1].startswith("its shardings are over meshes mesh, other, mesh")
    words = program(body.replace('%2 <@mesh, [{"d"}, {}]>', "%2 <@mesh, everything>"))
    assert words.skipped[0][1].startswith("sharding '<@mesh, everything>' is not understood")


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (('{"d"}, {"t"}', '{"t"}, {}', '{?}, {}'), "leaves a dimension open or cuts an axis"),
        (('{"d":(1)2}, {}', '{}, {}', '{}, {}'), "leaves a dimension open or cuts an axis"),
        (('{}, {}', '{}, {}', '{}, {"d", "t"}'), "n has extent 6|has extent 6"),
        (('{"x"}, {}', '{}, {}', '{}, {}'), "has no mesh axis 'x'"),
    ],
)  # fmt: skip
def test_contractions_left_alone(specs: tuple[str, str, str], message: str) -> None:
    found = program(constrained(*specs))
    assert found.contractions == ()
    ((_, reason),) = found.skipped
    assert re.search(message, reason)


def test_shardings_of_arguments_are_kept() -> None:
    text = (
        f"{HEAD}{MESH}  func.func public @main(%arg0: tensor<4x8xf32> {{sdy.sharding = "
        '#sdy.sharding<@mesh, [{"d"}, {}]>}) -> tensor<4x8xf32> {\n'
        "    return %arg0 : tensor<4x8xf32>\n  }\n}\n"
    )
    assert import_hlo(text).note("sharding of %arg0") == '<@mesh, [{"d"}, {}]>'


MALFORMED = [
    ("module", "line 1, column 7: found the end of the file, needs '{' of the module"),
    ("module @m {\n", "found the end of the file, needs an operation or '}'"),
    ("module @m {\n}\n", "needs a function @main"),
    ("module @m {\n}\n}", "found '}', needs the end of the file"),
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
     "dot_general needs the types of its operands and result"),
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
