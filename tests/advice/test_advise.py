"""Advice: layers of known models, the best degree and plan, the table and the picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from syncopate_jax.advice import advise as advise_module
from syncopate_jax.advice import curve
from syncopate_jax.advice.advise import Advice, Choice, advise
from syncopate_jax.advice.layers import MODELS, Layer, model_layers
from syncopate_jax.errors import InputError, UnsupportedError
from syncopate_jax.ir import presets
from syncopate_jax.ir.plan import Plan
from syncopate_jax.ir.topology import Topology
from syncopate_jax.synthesis.synthesize import synthesize
from tests.synthesis.topologies import both_ways, of_links

IN, OUT = Layer("in", 512, 1024, True), Layer("out", 512, 512, False)


def choices(degree: int, *seconds: float) -> list[Choice]:
    return [
        Choice(f"l{i}", degree, "ring", 1, s, True, 1.0 / degree, 0.1)
        for i, s in enumerate(seconds)
    ]


def test_layers_of_models() -> None:
    qkv, attention, up, down = model_layers("llama3-70b")
    assert (qkv.k, qkv.n, qkv.cut) == (8192, 10240, 10240)
    assert (attention.k, attention.n, attention.cut) == (8192, 8192, 8192)
    assert (up.n, down.k, down.cut) == (2 * 28672, 28672, 28672)
    assert sorted(MODELS) == ["llama3-405b", "llama3-70b", "llama3-8b", "qwen2-72b"]
    with pytest.raises(InputError, match="no model is called 'gpt'; known: llama3-405b, llama3-7"):
        model_layers("gpt")
    with pytest.raises(InputError, match="layer odd: n must be in 1"):
        Layer("odd", 4, 0, True)


def test_the_best_degree_takes_least_time() -> None:
    advice = Advice(
        "t", 64, (*choices(1, 1.0, 1.0), *choices(2, 0.5, 0.7), *choices(4, 0.7, 0.6)), (), 2.0
    )
    assert advice.degrees == (1, 2, 4)
    assert advice.best == 2 and advice.seconds(2) == 1.2
    assert advice.efficiency(1) == 1.0
    assert advice.efficiency(2) == pytest.approx(2.0 / 2.4)


def test_predicts_layers_at_all_degrees_that_fit() -> None:
    seen: list[tuple[int, int]] = []
    advice = advise(
        (IN, OUT), presets.h200_nvlink(4), tokens=512, splits=(1,),
        progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert advice.degrees == (1, 2, 4)
    assert seen == [(i + 1, 6) for i in range(6)]
    for degree in (2, 4):
        gather, scatter = advice.at(degree)
        assert gather.plan in ("all_gather_swizzle", "all_gather_ring", "synthesis")
        assert scatter.plan in ("reduce_scatter_direct", "reduce_scatter_ring", "synthesis")
        assert gather.compute == pytest.approx(advice.at(1)[0].compute / degree)
        # So little is computed that it is not worth sharing.
        assert gather.seconds > advice.at(1)[0].seconds
    assert advice.best == 1


def test_the_rate_is_that_of_one_rank_whatever_degrees_are_asked_for() -> None:
    layers = model_layers("llama3-8b")
    given: dict[str, Any] = {"tokens": 1024, "splits": (1,)}
    both = advise(layers, presets.h200_nvlink(2), **given)
    assert both.one_rank == both.seconds(1)
    assert both.efficiency(2) == both.seconds(1) / (2 * both.seconds(2)) < 1.0
    alone = advise(layers, presets.h200_nvlink(2), tp_degrees=(2,), **given)
    assert alone.efficiency(2) == both.efficiency(2)


def test_degrees_that_do_not_fit_are_said() -> None:
    odd = (Layer("in", 512, 1028, True), OUT)
    advice = advise(odd, presets.h200_nvlink(24), tokens=100, splits=(1,))
    assert advice.degrees == (1, 2, 4)
    assert advice.refused == (
        "degree 8: 100 tokens cannot be shared by degree 8",
        "degree 16: topology h200_nvlink has 24 ranks, not a multiple of it",
    )
    assert advise(odd, presets.h200_nvlink(8), tokens=64, splits=(1,)).refused == (
        "degree 8: layer in shares 1028 columns, not a multiple of degree 8",
    )


def test_templates_that_lack_links_are_left_out() -> None:
    advice = advise((OUT,), presets.nodes(2, 2), tp_degrees=(4,), tokens=512, splits=(1,))
    (choice,) = advice.choices
    assert choice.plan in ("synthesis", "hierarchical_reduce_scatter")
    assert len(advice.refused) == 2
    assert advice.refused[0].startswith("degree 4, reduce_scatter_direct: rank 0 op ")


def refusing(*names: str) -> Callable[..., Plan]:
    """``synthesize``, which refuses the kinds called ``names``."""

    def made(kind: str, *given: Any, **more: Any) -> Plan:
        if kind in names:
            raise InputError(f"{kind} is refused here")
        return synthesize(kind, *given, **more)

    return made


def test_nodes_are_tried_by_template_too(monkeypatch: pytest.MonkeyPatch) -> None:
    both = ("all_gather", "reduce_scatter")
    monkeypatch.setattr(advise_module, "synthesize", refusing(*both))
    advice = advise((IN, OUT), presets.nodes(2, 2), tp_degrees=(4,), tokens=512, splits=(1, 2))
    assert [choice.plan for choice in advice.choices] == [f"hierarchical_{kind}" for kind in both]
    assert "degree 4, synthesis: all_gather is refused here" in advice.refused
    assert "degree 4, synthesis: reduce_scatter is refused here" in advice.refused


@pytest.mark.parametrize("layers", ["llama3-8b", 3, ("qkv",)])
def test_layers_of_another_kind(layers: Any) -> None:
    with pytest.raises(InputError) as caught:
        advise(layers, presets.nodes(2, 2))
    assert str(caught.value) == (
        f"advise: layers needs a sequence of Layer, found {layers!r}; "
        f"syncopate_jax.advice.layers.model_layers(name) gives those of a model"
    )
    with pytest.raises(InputError, match="advise: topology needs a Topology, found 'h200'"):
        advise((IN, OUT), "h200")  # type: ignore[arg-type]


def test_a_refusal_at_one_degree_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advise_module, "synthesize", refusing("reduce_scatter"))
    # Ranks in a row, each joined to the next: no template of a reduce-scatter fits four of them.
    row = of_links("row", 4, both_ways((0, 1), (1, 2), (2, 3)))
    row = replace(row, channels=(replace(row.channels[0], name="nvlink"),))
    advice = advise((IN, OUT), row, tokens=512, splits=(1,))
    assert advice.degrees == (1, 2)
    assert advice.refused[-2:] == (
        "degree 4, synthesis: reduce_scatter is refused here",
        "degree 4: no plan serves layer out",
    )
    with pytest.raises(InputError, match=r"no degree can be used on topology row:\n  degree 4, "):
        advise((IN, OUT), row, tp_degrees=(4,), tokens=512, splits=(1,))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": ()}, "needs at least one layer"),
        ({"tokens": 0}, "tokens must be in 1"),
        ({"tp_degrees": ()}, "tp_degrees is empty"),
        ({"tp_degrees": (0,)}, "tp degree must be in 1"),
        ({"tp_degrees": (8,)}, "degree 8 needs 8 ranks, topology h200_nvlink has 4"),
        ({"tp_degrees": (3,)}, "512 tokens cannot be shared by degree 3; pad it to a multip"),
        ({"tp_degrees": (3,), "tokens": 513}, "layer in shares 1024 columns, not a multiple of de"),
        ({"tp_degrees": (3,)}, "divides the tokens and what each layer shares, such as 2$"),
        ({"tp_degrees": (3,), "tokens": 513}, "each layer shares, such as 1$"),
        ({"tp_degrees": (3,), "tokens": 3, "layers": (OUT,)}, "layer out shares 512 rows, not"),
    ],
)
def test_refuses(arguments: dict[str, object], message: str) -> None:
    given: dict[str, object] = {"layers": (IN, OUT), "tokens": 512, **arguments}
    with pytest.raises(InputError, match=message):
        advise(given.pop("layers"), presets.h200_nvlink(4), **given)  # type: ignore[arg-type]


def test_refuses_topologies_without_rates_or_ways() -> None:
    idle = Topology("idle", 2, presets.ring(2).channels)
    with pytest.raises(InputError, match="topology idle gives rank 0 no flops"):
        advise((IN,), idle, tokens=512)
    apart = of_links("apart", 2, {(0, 1): 1e9})
    with pytest.raises(InputError, match="rank 1 cannot reach rank 0"):
        advise((IN,), apart, tp_degrees=(2,), tokens=512)


def test_table_and_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    advice = Advice("t", 64, (*choices(1, 1.0, 1.0), *choices(2, 0.5, 0.7)), (), 2.0)
    text = curve.table(advice)
    assert "2  l1     ring  " in text and "700000.0" in text
    assert "degree   2:  1200000.0 us   83% of the ranks' rate" in text
    assert text.endswith("  <- best")
    pytest.importorskip("matplotlib")
    for name in ("a.svg", "a.png"):
        curve.draw(advice, tmp_path / name)
    assert "tensor-parallel degree" in (tmp_path / "a.svg").read_text()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InputError, match=r"needs a name that ends in \.svg or \.png"):
        curve.draw(advice, tmp_path / "a.pdf")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"needs matplotlib: pip install matplotlib; the"):
        curve.check_picture("a.svg")
