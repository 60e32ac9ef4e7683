"""clip_adamw and ClipAdamW against torch's own clip_grad_norm_ and AdamW."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch.nn.utils import clip_grad_norm_

import forge
from forge.errors import KernelError
from forge.kernels.ops import clip_adamw_optimizer, clip_adamw_tables
from forge.kernels.ops.clip_adamw import CLIP_ADAMW, clip_adamw, clip_adamw_op, ops
from forge.kernels.ops.clip_adamw_optimizer import ClipAdamW
from forge.kernels.ops.clip_adamw_tables import CHUNK
from forge.testing import TinyTask, fit_tiny
from forge_plugins import Guard
from forge_plugins.guard import takes_flag
from tests.kernel_kit import DEVICE, check_launches_where_the_tensors_are, distance, poisoned_memory

OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "max_norm": 1.0}
FULL = (torch.float32,) * 3
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
shapes = st.lists(st.lists(st.integers(0, 20), max_size=3), min_size=1, max_size=5)


def lists(shapes, dtypes=FULL, scale=1.0, made=0.0) -> list[Any]:
    """Parameters, gradients, both moments, one step counter."""
    param, grad, state = dtypes
    return [
        [torch.randn(shape, device=DEVICE).to(param) for shape in shapes],
        [(torch.randn(shape, device=DEVICE) * scale).to(grad) for shape in shapes],
        [(torch.randn(shape, device=DEVICE) * scale).to(state) for shape in shapes],
        [(torch.rand(shape, device=DEVICE) * scale**2).to(state) for shape in shapes],
        torch.tensor(made, device=DEVICE),
    ]


def mapped(args, function):
    return [[function(t) for t in arg] if isinstance(arg, (list, tuple)) else function(arg) for arg in args]


def flat(args) -> list[Tensor]:
    return [t for arg in args for t in (arg if isinstance(arg, (list, tuple)) else [arg])]


def check(args, options=OPTIONS, tolerance=None) -> None:
    """As near to the reference in float64 as the contract says; gradients are not touched."""
    bound = max(CLIP_ADAMW.tolerance[t.dtype] for t in flat(args)) if tolerance is None else tolerance
    assert CLIP_ADAMW.supports(*args, **options) is None, "the reference would run: this would test nothing"
    exact = mapped(args, lambda t: t.detach().double())
    norm = CLIP_ADAMW.reference(*exact, **options)
    grads = mapped([args[1]], torch.clone)[0]
    with poisoned_memory():
        result = clip_adamw(*args, **options)
    for place, (found, right) in enumerate(zip([result, *flat(args)], [norm, *flat(exact)], strict=True)):
        off = distance(found, right)
        assert off <= bound, f"tensor {place} is off by {off:.1e}"
    assert same(args[1], grads)


def same(first: Iterable[Tensor], second: Iterable[Tensor]) -> bool:
    return all(torch.equal(a.nan_to_num(-7.0), b.nan_to_num(-7.0)) for a, b in zip(first, second, strict=True))


# -- the function -----------------------------------------------------------------------------------------------------


@given(
    shapes=shapes,
    dtypes=st.tuples(dtypes, dtypes, dtypes),
    scale=st.sampled_from([0.01, 1.0, 30.0]),
    max_norm=st.sampled_from([None, 0.0, 0.5, 1e4]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    betas=st.sampled_from([(0.9, 0.999), (0.0, 0.95)]),
    made=st.sampled_from([0.0, 7.0, 1e5]),
)
def test_any_shapes_and_dtypes_equal_the_reference(shapes, dtypes, scale, max_norm, weight_decay, betas, made):
    options = {**OPTIONS, "max_norm": max_norm, "weight_decay": weight_decay, "betas": betas}
    check(lists(shapes, dtypes, scale, made), options)


def test_the_reference_is_clip_grad_norm_and_adamw():
    args = mapped(lists([(5, 3), (7,), ()]), lambda t: t.double().cpu())
    params = [nn.Parameter(p.clone()) for p in args[0]]
    torch_options = {key: value for key, value in OPTIONS.items() if key != "max_norm"}
    optimizer = torch.optim.AdamW(params, foreach=False, **torch_options)
    for param, grad, exp_avg, exp_avg_sq in zip(params, *args[1:4], strict=True):
        param.grad = grad.clone()
        optimizer.state[param] = {"step": torch.zeros(()), "exp_avg": exp_avg.clone(), "exp_avg_sq": exp_avg_sq.clone()}
    norm = clip_grad_norm_(params, OPTIONS["max_norm"])
    optimizer.step()
    torch.testing.assert_close(CLIP_ADAMW.reference(*args, **OPTIONS), norm)
    torch.testing.assert_close(args[0], [p.detach() for p in params])
    torch.testing.assert_close(args[2], [optimizer.state[p]["exp_avg"] for p in params])
    torch.testing.assert_close(args[3], [optimizer.state[p]["exp_avg_sq"] for p in params])


@pytest.mark.parametrize("size", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1025])
def test_tensors_of_several_chunks_are_updated_to_the_last_entry(size):
    check(lists([(3,), (size,), (0,)]))


def test_addresses_may_be_odd():
    args = mapped(lists([(1001,), (64,)]), lambda t: t[1:] if t.ndim else t)
    check(args)


def test_any_dense_order_in_memory_will_do():
    args = lists([(2, 3, 4, 5), (6, 7)])
    args[:4] = mapped(
        args[:4], lambda t: t.to(memory_format=torch.channels_last) if t.ndim == 4 else t.t().contiguous().t()
    )
    check(args)


def test_gradients_may_lie_in_another_order_and_the_plan_stays():
    args = lists([(6, 7), (3,)])
    plans = []
    for _ in range(3):
        args[1][0] = torch.randn(7, 6, device=DEVICE).t()
        check(args)
        plans.append(clip_adamw_tables._recent[0])
    assert plans[1] is plans[0]
    assert plans[2] is plans[0]


def test_no_copy_of_a_gradient_outlives_its_step(monkeypatch):
    copies = []

    def watched(lists):
        made = clip_adamw_tables.alike(lists)
        copies.extend(weakref.ref(g) for g in made.grads if all(g is not given for given in lists.grads))
        return made

    for module in ("clip_adamw", "clip_adamw_optimizer"):
        monkeypatch.setattr(f"forge.kernels.ops.{module}.alike", watched)
    args = lists([(6, 7), (3,)])
    args[1][0] = args[1][0].t().contiguous().t()
    clip_adamw(*args, **OPTIONS)
    net = network()
    optimizer = ClipAdamW(net.parameters())
    backward(net, 0)
    for param in net.parameters():
        if param.ndim == 2:
            param.grad = param.grad.t().contiguous().t()
    optimizer.step()
    assert optimizer._plan is not None
    assert len(copies) == 3
    assert not any(copy() is not None for copy in copies)


def test_parameters_with_gaps_go_to_the_reference():
    args = lists([(6, 8)])
    args[0] = [args[0][0][:, ::2]]
    args[1:4] = mapped(args[1:4], lambda t: t[:, :4].contiguous())
    assert "gaps" in str(CLIP_ADAMW.supports(*args, **OPTIONS))
    expected = mapped(args, torch.clone)
    assert torch.equal(clip_adamw(*args, **OPTIONS), CLIP_ADAMW.reference(*expected, **OPTIONS))
    assert same(flat(args), flat(expected))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("max_norm", [1.0, None])
def test_gradients_that_are_not_finite_do_what_they_do_in_torch(bad, max_norm):
    args = lists([(5,), (7,)])
    args[1][0][2] = bad
    check(args, {**OPTIONS, "max_norm": max_norm})


def test_gradients_whose_squares_leave_float32_have_an_infinite_norm():
    args = lists([(5,)], scale=1e25)
    assert clip_adamw(*args, **OPTIONS).isinf()


def test_no_tensors_have_norm_0():
    assert clip_adamw([], [], [], [], torch.zeros(()), **OPTIONS) == 0


def test_found_inf_leaves_everything_as_it_is():
    args = lists([(5,), (9,)], made=3.0)
    args[1][0][0] = float("nan")
    before = mapped(args, torch.clone)
    clip_adamw(*args, **OPTIONS, found_inf=torch.ones(1, device=DEVICE))
    assert same(flat(args), flat(before))
    clip_adamw(*args, **OPTIONS, found_inf=torch.zeros(1, device=DEVICE))
    assert args[4] == 4
    assert not same(flat(args), flat(before))


def test_each_tensor_can_have_its_own_counter():
    shared, own = (lists([(5,)] * 3) for _ in range(2))
    own[:4] = mapped(shared[:4], torch.clone)
    own[4] = [torch.tensor(float(n), device=DEVICE) for n in (0, 0, 50)]
    clip_adamw(*shared, **OPTIONS)
    check(own)
    assert shared[4] == 1
    assert [float(step) for step in own[4]] == [1, 1, 51]
    assert same(shared[0][:2], own[0][:2])
    assert not same(shared[0][2:], own[0][2:])


def test_a_shared_counter_counts_once_for_any_number_of_tensors():
    check(lists([(1,)] * 130))


def test_a_learning_rate_on_the_device_is_read_when_the_kernel_runs():
    args, rate = lists([(5,)]), torch.tensor(1e-2, device=DEVICE)
    check(args, {**OPTIONS, "lr": rate})
    rate.fill_(0.5)
    check(args, {**OPTIONS, "lr": rate})


def test_tensors_that_have_moved_are_found_again():
    args = lists([(5,), (4,)])
    check(args)
    args[1] = [grad.clone() for grad in args[1]]
    check(args)
    args[0][0].data = args[0][0].data.clone()
    check(args)
    args[1][0] = torch.randn(6, device=DEVICE)[:5].bfloat16()
    check(args)


def test_it_is_launched_where_the_tensors_are(monkeypatch):
    args = lists([(5,)])
    check_launches_where_the_tensors_are(monkeypatch, ops, lambda: clip_adamw(*args, **OPTIONS))


def test_the_same_gradients_give_the_same_bits():
    first = lists([(3 * CHUNK + 11,), (100, 7)])
    second = mapped(first, torch.clone)
    assert torch.equal(clip_adamw(*first, **OPTIONS), clip_adamw(*second, **OPTIONS))
    assert same(flat(first), flat(second))


def test_autograd_knows_that_parameters_have_changed():
    args = lists([(5,)])
    args[0][0].requires_grad_()
    loss = args[0][0].square().sum()
    clip_adamw(*args, **OPTIONS)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("trained", [False, True])
def test_compiles_whole(trained):
    args = lists([(5,), (3, 4)])
    args[0] = [p.requires_grad_(trained) for p in args[0]]
    expected = mapped(args, lambda t: t.detach().clone())
    norm = clip_adamw(*expected, **OPTIONS)
    torch.compiler.reset()
    compiled = torch.compile(clip_adamw, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*args, **OPTIONS), norm)
    assert same(flat(args), flat(expected))


def test_the_operator_is_registered_as_torch_asks():
    args = lists([(5,), (3, 4)])
    torch.library.opcheck(clip_adamw_op, (*args[:4], [args[4]], None, 1e-2, 0.9, 0.999, 1e-8, 0.1, 1.0, None))


def test_the_cost_is_32_bytes_for_a_parameter_in_float32():
    assert CLIP_ADAMW.cost(*lists([(5,), (3, 4)]), **OPTIONS).bytes == 32 * 17


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grads": []}, "1 parameters, 0 gradients"),
        ({"grads": [torch.ones(4)]}, r"parameter 0.*\(5,\), \(4,\), \(5,\), \(5,\)"),
        ({"step": [torch.zeros(())] * 2}, "2 step counters"),
        ({"betas": (0.9, 1.0)}, r"betas are \(0.9, 1.0\)"),
        ({"max_norm": -1.0}, "max_norm is -1.0"),
        ({"lr": -1.0}, "lr is -1.0"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"eps": -1.0}, "eps is -1.0"),
        ({"weight_decay": -3.0}, "weight_decay is -3.0"),
        ({"params": [torch.arange(5)]}, "parameter 0 is int64"),
        ({"grads": [torch.ones(5, dtype=torch.complex64)]}, "gradient 0 is complex64"),
        ({"grads": [None]}, "gradient 0 is NoneType"),
        ({"exp_avg_sqs": [torch.arange(5)]}, "moment 0 is int64"),
        ({"step": torch.tensor(3)}, "step counter 0 is int64"),
    ],
)
@pytest.mark.parametrize("interpreted", [True, False])
def test_arguments_that_make_no_sense_are_refused_with_and_without_the_kernel(
    change, message, interpreted, monkeypatch
):
    monkeypatch.setattr("forge.kernels.contract.INTERPRETED", interpreted)
    names = ("params", "grads", "exp_avgs", "exp_avg_sqs", "step")
    arguments = {**dict(zip(names, lists([(5,)]), strict=True)), **OPTIONS, **change}
    with pytest.raises(KernelError, match=message):
        clip_adamw(**arguments)


def test_the_same_tensor_twice_is_refused():
    for place in (0, 2):
        args = lists([(5,), (5,)])
        args[place] = [args[place][0]] * 2
        with pytest.raises(KernelError, match="the same tensor twice"):
            clip_adamw(*args, **OPTIONS)
    args = lists([(5,)])
    args[3] = args[2]
    with pytest.raises(KernelError, match="the same tensor twice"):
        clip_adamw(*args, **OPTIONS)


def test_the_same_tensor_twice_is_not_compiled():
    args = lists([(5,), (5,)])
    args[0] = [args[0][0]] * 2
    torch.compiler.reset()
    compiled = torch.compile(clip_adamw, fullgraph=True, backend="aot_eager")
    with pytest.raises(Unsupported, match="Observed exception"):
        compiled(*args, **OPTIONS)


def test_a_changing_learning_rate_compiles_whole():
    args = lists([(5,)])
    expected = mapped(args, torch.clone)
    torch.compiler.reset()
    compiled = torch.compile(clip_adamw, fullgraph=True, backend="aot_eager")
    for lr in (1e-2, 2e-2, 3e-2):
        compiled(*args, **{**OPTIONS, "lr": lr})
        clip_adamw(*expected, **{**OPTIONS, "lr": lr})
    assert same(flat(args), flat(expected))


# -- torch's defaults -------------------------------------------------------------------------------------------------


@contextmanager
def defaults(dtype: torch.dtype, device: str) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


ODD_DEFAULTS = [(torch.bfloat16, "cpu"), (torch.float64, "cpu"), (torch.float32, "meta"), (torch.bfloat16, "meta")]


@pytest.mark.parametrize("default", ODD_DEFAULTS)
@pytest.mark.parametrize("function", [clip_adamw, CLIP_ADAMW.reference])
def test_torchs_defaults_change_nothing(function, default):
    args = lists([(5,), (3, 4)])
    expected = mapped(args, torch.clone)
    norm = function(*expected, **OPTIONS)
    with defaults(*default):
        result = function(*args, **OPTIONS)
        empty = function([], [], [], [], expected[4].clone(), **OPTIONS)
    assert result.dtype == norm.dtype == empty.dtype == torch.float32
    assert empty.device.type == "cpu"
    assert torch.equal(result, norm)
    assert same(flat(args), flat(expected))


@pytest.mark.parametrize("default", ODD_DEFAULTS)
def test_torchs_defaults_change_nothing_for_the_optimizer(default):
    ours, optimizer, theirs, right = pair()
    for batch in range(2):
        backward(ours, batch)
        with defaults(*default):
            optimizer.step()
        backward(theirs, batch)
        clip_grad_norm_(theirs.parameters(), 0.5)
        right.step()
    assert optimizer._plan is not None
    assert_close(ours, theirs)


def test_among_dual_numbers_the_reference_runs():
    args = lists([(5,)])
    check(args)  # so that there is a plan for them
    expected = mapped(args, torch.clone)
    with torch.autograd.forward_ad.dual_level():
        assert "forward-mode" in str(CLIP_ADAMW.supports(*args, **OPTIONS))
        norm = clip_adamw(*args, **OPTIONS)
    assert torch.equal(norm, CLIP_ADAMW.reference(*expected, **OPTIONS))
    assert same(flat(args), flat(expected))


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacfwd])
def test_inside_functorch_torch_refuses_what_it_cannot_undo_and_nothing_has_changed(transform):
    args = lists([(5,)])
    check(args)
    before = mapped(args, torch.clone)

    def loss(x: Tensor) -> Tensor:
        grads = [grad * x.sum() for grad in args[1]]
        clip_adamw(args[0], grads, *args[2:], **OPTIONS)
        return x.sum()

    with pytest.raises(RuntimeError, match=r"in-place|inplace"):
        transform(loss)(torch.ones(2, device=args[0][0].device))
    assert same(flat(args), flat(before))


# -- CUDA graphs ------------------------------------------------------------------------------------------------------

POISON = -0x5A5A


class Graph:
    """A CUDA graph in host memory: a capture writes copies and launches down, and only a replay does them."""

    capturing: Graph | None = None

    def __init__(self):
        self.work: list[Callable[[], Any]] = []

    def __enter__(self) -> Graph:
        Graph.capturing = self
        return self

    def __exit__(self, *error: object) -> None:
        Graph.capturing = None

    def replay(self) -> None:
        for each in self.work:
            each()


def do(work: Callable[[], Any]) -> None:
    if Graph.capturing is None:
        work()
    else:
        Graph.capturing.work.append(work)


class Launch:
    """A kernel that a capture writes down. It never reads a table that was not copied, and a capture's is kept."""

    def __init__(self, kernel: Any):
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            tables = [a for a in args if isinstance(a, Tensor) and a.dtype in (torch.int32, torch.int64)]
            if Graph.capturing is not None:
                kept = {t.data_ptr() for t in tensors_in(clip_adamw_tables._captured)}
                assert all(table.data_ptr() in kept for table in tables)

            def work() -> None:
                assert not any((table == POISON).any() for table in tables), "a table was read before it was copied"
                self.kernel[grid](*args, **options)

            do(work)

        return launch


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def copied(values: Tensor, device: torch.device) -> Tensor:
    there, here = torch.full_like(values, POISON), values.clone()
    do(lambda: there.copy_(here))
    return there


@pytest.fixture
def emulated_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE != "cpu":
        pytest.skip("real graphs are in test_kernel_clip_adamw_cuda.py")
    for module in (clip_adamw_tables, clip_adamw_optimizer):
        monkeypatch.setattr(module, "capturing", lambda device: Graph.capturing is not None)
    monkeypatch.setattr(clip_adamw_tables, "copied", copied)
    monkeypatch.setattr(clip_adamw_tables, "_captured", [])
    for name in ("_squares", "_settle", "_update"):
        monkeypatch.setattr(ops, name, Launch(getattr(ops, name)))


class Updates:
    """Updates of the same parameters, eager, captured and replayed, beside the reference of what has run."""

    def __init__(self):
        self.args = lists([(5,), (3, 4)])
        self.right = mapped(self.args, torch.clone)
        self.held: list[Any] = []

    def inputs(self) -> tuple[list[Tensor], dict[str, Any]]:
        """Gradients at an address of their own, and a rate of their own."""
        grads = [torch.randn_like(p) for p in self.args[0]]
        self.held.append(grads)
        return grads, {**OPTIONS, "lr": 1e-3 * len(self.held)}

    def capture(self) -> Callable[[], None]:
        grads, options = self.inputs()
        before = mapped(self.args, torch.clone)
        with Graph() as graph:
            clip_adamw(self.args[0], grads, *self.args[2:], **options)
        assert same(flat(self.args), flat(before))

        def replay() -> None:
            graph.replay()
            self.compare(grads, options)

        return replay

    def eager(self) -> None:
        grads, options = self.inputs()
        clip_adamw(self.args[0], grads, *self.args[2:], **options)
        self.compare(grads, options)

    def compare(self, grads: list[Tensor], options: dict[str, Any]) -> None:
        CLIP_ADAMW.reference(self.right[0], grads, *self.right[2:], **options)
        for place in (0, 2, 3, 4):
            torch.testing.assert_close(self.args[place], self.right[place], rtol=1e-5, atol=1e-6)


def test_an_eager_step_after_a_capture_that_was_never_replayed_sends_its_own_tables(emulated_graphs):
    updates = Updates()
    updates.capture()  # the first of all: it makes the plan
    updates.eager()
    updates.capture()
    grads, options = updates.held[-1], {**OPTIONS, "lr": 1e-3 * len(updates.held)}
    clip_adamw(updates.args[0], grads, *updates.args[2:], **options)  # the very values that were captured
    updates.compare(grads, options)


def test_a_graph_goes_on_with_its_own_tables_whatever_runs_between_its_replays(emulated_graphs):
    updates = Updates()
    updates.eager()
    first = updates.capture()
    second = updates.capture()
    second()
    first()
    updates.eager()
    third = updates.capture()
    for replay in (first, third, second, updates.eager, third, first, second):
        replay()


def test_a_second_graph_of_the_same_values_does_not_wait_for_the_first_to_be_replayed(emulated_graphs):
    args = lists([(5,)])
    right = mapped(args, torch.clone)
    graphs = [Graph(), Graph()]
    for graph in graphs:
        with graph:
            clip_adamw(*args, **OPTIONS)
    for graph in reversed(graphs):
        graph.replay()
        CLIP_ADAMW.reference(*right, **OPTIONS)
    torch.testing.assert_close(flat(args), flat(right), rtol=1e-5, atol=1e-6)


def test_a_graph_reads_a_learning_rate_on_the_device_at_each_replay(emulated_graphs):
    args, rate = lists([(5,)]), torch.tensor(1e-2)
    right = mapped(args, torch.clone)
    options = {**OPTIONS, "lr": rate}
    with Graph() as graph:
        clip_adamw(*args, **options)
    for value in (1e-2, 0.5):
        rate.fill_(value)
        graph.replay()
        CLIP_ADAMW.reference(*right, **options)
        clip_adamw(*args, **OPTIONS)  # with a number, meanwhile
        CLIP_ADAMW.reference(*right, **OPTIONS)
    torch.testing.assert_close(flat(args), flat(right), rtol=1e-5, atol=1e-6)


def test_the_optimizer_goes_on_after_a_capture_that_came_to_nothing(emulated_graphs):
    ours, optimizer, theirs, right = pair()
    both_step(ours, optimizer, theirs, right, 0)
    held = [p.grad for p in ours.parameters()]
    for o in (optimizer, right):
        o.param_groups[0]["lr"] = 0.3
    ours.zero_grad(set_to_none=True)
    backward(ours, 1)
    with Graph():
        optimizer.step()
    optimizer.step()
    backward(theirs, 1)
    clip_grad_norm_(theirs.parameters(), 0.5)
    right.step()
    assert len(held) == 4
    assert_close(ours, theirs)


def test_a_parameters_first_step_cannot_be_captured(emulated_graphs):
    net = network()
    optimizer = ClipAdamW(net.parameters())
    backward(net, 0)
    with pytest.raises(KernelError, match="Step once before the capture"), Graph():
        optimizer.step()
    assert not any(optimizer.state.values())


# -- the optimizer ----------------------------------------------------------------------------------------------------


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 3)).to(DEVICE)


def groups(net: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in net.parameters() if p.ndim > 1]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": [p for p in net.parameters() if p.ndim == 1], "lr": 2e-2, "weight_decay": 0.0},
    ]


def pair(max_norm: float = 0.5, **options: Any) -> tuple[nn.Module, ClipAdamW, nn.Module, torch.optim.AdamW]:
    ours, theirs = network(), network()
    return (
        *(ours, ClipAdamW(groups(ours), lr=1e-2, max_norm=max_norm, **options)),
        *(theirs, torch.optim.AdamW(groups(theirs), lr=1e-2, fused=True, **options)),
    )


def backward(net: nn.Module, batch: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(batch)
    net.zero_grad()
    (net(torch.randn(4, 6, generator=generator).to(DEVICE)).square().sum() * scale).backward()


def both_step(ours, optimizer, theirs, right, batch: int) -> Tensor:
    for net in (ours, theirs):
        backward(net, batch)
    optimizer.step()
    norm = clip_grad_norm_(theirs.parameters(), optimizer.max_norm)
    right.step()
    return norm


def assert_close(ours: nn.Module, theirs: nn.Module, **tolerance: float) -> None:
    torch.testing.assert_close(list(ours.parameters()), list(theirs.parameters()), **tolerance)


def test_clip_adamw_trains_as_torch_does_with_groups_and_a_schedule():
    ours, optimizer, theirs, right = pair()
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + n)) for o in (optimizer, right)]
    for batch in range(5):
        norm = both_step(ours, optimizer, theirs, right, batch)
        torch.testing.assert_close(optimizer.total_norm, norm)
        for schedule in schedules:
            schedule.step()
    assert_close(ours, theirs)
    assert optimizer._plan is not None, "torch's own functions ran"


def test_a_tensor_as_learning_rate_drives_all_groups():
    rates = [torch.tensor(1e-2, device=DEVICE) for _ in range(2)]
    ours, theirs = network(), network()
    optimizer = ClipAdamW(ours.parameters(), lr=rates[0], max_norm=0.5)
    right = torch.optim.AdamW(theirs.parameters(), lr=rates[1], fused=True)
    for batch in range(3):
        both_step(ours, optimizer, theirs, right, batch)
        for rate in rates:
            rate.mul_(0.5)
    assert_close(ours, theirs)


def test_parameters_without_gradients_wait_with_their_counters():
    ours, optimizer, theirs, right = pair()
    for batch in range(4):
        for net in (ours, theirs):
            net[0].requires_grad_(batch % 2 == 0)
        both_step(ours, optimizer, theirs, right, batch)
    assert_close(ours, theirs)
    assert sorted(float(state["step"]) for state in optimizer.state.values()) == [2, 2, 4, 4]


def test_nothing_is_sent_to_the_device_while_nothing_changes(monkeypatch):
    net = network()
    optimizer = ClipAdamW(groups(net), lr=1e-2)
    backward(net, 0)
    optimizer.step()
    plan = optimizer._plan
    assert plan is not None
    sent = []
    monkeypatch.setattr(clip_adamw_tables, "copied", lambda values, device: sent.append(values) or values.to(device))
    optimizer.step()
    assert optimizer._plan is plan
    assert not sent
    optimizer.param_groups[0]["lr"] = 0.3
    optimizer.step()
    assert optimizer._plan is plan
    assert len(sent) == 1
    assert sent[0].view(torch.float64)[0] == 0.3


def test_state_goes_to_torchs_adamw_and_back():
    ours, optimizer, theirs, right = pair()
    both_step(ours, optimizer, theirs, right, 0)
    assert optimizer.state_dict().keys() == right.state_dict().keys()
    assert optimizer.state_dict()["state"][0].keys() == right.state_dict()["state"][0].keys()
    plain = torch.optim.AdamW(groups(theirs), lr=1.0)
    plain.load_state_dict(optimizer.state_dict())
    foreach = torch.optim.AdamW(groups(theirs), lr=1.0, foreach=True)
    backward(theirs, 0)
    foreach.step()
    optimizer.load_state_dict(copy.deepcopy(foreach.state_dict()))
    assert all(group["fused"] and group["capturable"] for group in optimizer.param_groups)
    assert all(state["step"].device.type == DEVICE for state in optimizer.state.values())
    right.load_state_dict(foreach.state_dict())
    ours.load_state_dict(theirs.state_dict())
    both_step(ours, optimizer, theirs, right, 1)
    assert_close(ours, theirs)


def test_a_copy_clips_as_its_original():
    net = network()
    optimizer = copy.deepcopy(ClipAdamW(net.parameters(), max_norm=0.25))
    assert optimizer.max_norm == 0.25
    assert optimizer._step_supports_amp_scaling


def test_state_that_was_replaced_is_found():
    ours, optimizer, theirs, right = pair()
    both_step(ours, optimizer, theirs, right, 0)
    for o in (optimizer, right):
        o.state.clear()
    both_step(ours, optimizer, theirs, right, 1)
    assert_close(ours, theirs)


def test_a_loss_scalers_flags_are_obeyed():
    ours, optimizer, theirs, right = pair()
    both_step(ours, optimizer, theirs, right, 0)
    before = copy.deepcopy(ours)
    backward(ours, 1, scale=8.0)
    optimizer.grad_scale = torch.tensor([8.0], device=DEVICE)
    optimizer.found_inf = torch.tensor([1.0], device=DEVICE)
    optimizer.step()
    assert_close(ours, before, rtol=0, atol=0)
    optimizer.found_inf.zero_()
    optimizer.step()
    del optimizer.found_inf, optimizer.grad_scale
    backward(theirs, 1)
    norm = clip_grad_norm_(theirs.parameters(), 0.5)
    right.step()
    torch.testing.assert_close(optimizer.total_norm, norm)
    assert_close(ours, theirs)


def test_the_guard_can_tell_it_to_leave_an_update_out():
    assert takes_flag(ClipAdamW(network().parameters()), next(network().parameters()).device)


class Clipped(TinyTask):
    """forge's tiny task, trained by ClipAdamW."""

    def configure_optimizers(self) -> Any:
        return ClipAdamW(self.parameters(), lr=1e-2, max_norm=0.1)


class ClippedByTorch(TinyTask):
    """The same by torch's two functions."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)

    @forge.hookimpl
    def forge_edit_grads(self, step: forge.Step) -> None:
        clip_grad_norm_(self.parameters(), 0.1)


def test_off_cuda_it_is_torchs_two_functions_bit_for_bit(monkeypatch):
    monkeypatch.setattr("forge.kernels.contract.INTERPRETED", False)
    results = [fit_tiny([Guard()], task=task)[0] for task in (Clipped(), ClippedByTorch())]
    assert same(*(task.parameters() for task in results))


def test_off_cuda_a_loss_scalers_flags_are_obeyed_too(monkeypatch):
    monkeypatch.setattr("forge.kernels.contract.INTERPRETED", False)
    task, right = Clipped(), Clipped()
    right.load_state_dict(task.state_dict())
    optimizers = [ClipAdamW(t.parameters(), max_norm=0.1) for t in (task, right)]
    optimizers[0].grad_scale = torch.tensor(8.0)
    for t, scale in ((task, 8.0), (right, 1.0)):
        (sum(p.square().sum() for p in t.parameters()) * scale).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert same(task.parameters(), right.parameters())
    assert torch.equal(optimizers[0].total_norm, optimizers[1].total_norm)
    optimizers[0].found_inf = torch.ones(())
    optimizers[0].step()
    assert same(task.parameters(), right.parameters())


def test_a_closure_is_called_with_gradients_on():
    net = network()
    optimizer = ClipAdamW(net.parameters())

    def closure() -> Tensor:
        backward(net, 0)
        return torch.ones(()).requires_grad_() * 2

    assert optimizer.step(closure).requires_grad


def test_a_parameter_twice_in_a_group_is_refused():
    param = nn.Parameter(torch.ones(3))
    with (
        pytest.raises(KernelError, match="the same parameter twice"),
        pytest.warns(UserWarning, match="duplicate parameters"),
    ):
        ClipAdamW([param, param])


def test_a_negative_norm_is_refused():
    with pytest.raises(KernelError, match=r"max_norm is -1\.0"):
        ClipAdamW(network().parameters(), max_norm=-1.0)
