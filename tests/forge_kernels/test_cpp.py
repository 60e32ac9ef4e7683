"""all_finite in C++: built when it is first used, equal to plain torch, and plain torch where there is no compiler."""

from __future__ import annotations

import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forge.errors import KernelError
from forge_kernels.ops.cpp import build
from forge_kernels.ops.cpp.finite import ALL_FINITE, DTYPES, SOURCE, all_finite

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
shapes = st.lists(st.integers(0, 9), max_size=3)
values = st.sampled_from([0.0, 1.0, -3.5, 6e4, float("inf"), -float("inf"), float("nan")])


@needs_compiler
def test_the_cpp_is_built_and_takes_over_from_python():
    assert all_finite([torch.ones(3)])
    assert build.missing(SOURCE) is None
    assert torch._C._dispatch_has_kernel_for_dispatch_key("forge::all_finite", "CPU")


@given(st.lists(st.tuples(shapes, st.sampled_from(DTYPES), values), max_size=4))
def test_any_list_equals_the_reference(entries):
    tensors = [torch.randn(shape).to(dtype) for shape, dtype, _ in entries]
    for tensor, (_, _, value) in zip(tensors, entries, strict=True):
        if tensor.numel():
            tensor.view(-1)[-1] = value
    found = all_finite(tensors)
    assert found.dtype == torch.bool
    assert found.shape == ()
    assert torch.equal(found, ALL_FINITE.reference(tensors))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_last_entry_of_a_long_tensor_is_seen(dtype):
    tensors = [torch.zeros(100_003, dtype=dtype), torch.zeros(70_001, dtype=dtype)]
    assert all_finite(tensors)
    tensors[1][-1] = float("nan")
    assert not all_finite(tensors)


def test_strides_do_not_matter():
    whole = torch.zeros(8, 6, 4)
    whole[3, 1, 2] = float("nan")
    assert not all_finite([whole.permute(2, 0, 1)])
    assert all_finite([whole[:, ::2]])
    assert not all_finite([whole[:, 1::2]])
    assert all_finite([whole[0, 0].expand(5, 4)])


@pytest.mark.parametrize("tensors", [[torch.arange(3)], [torch.ones(2, dtype=torch.complex64)], [], [torch.ones(0)]])
def test_what_the_cpp_does_not_take_goes_to_plain_torch(tensors):
    assert all_finite(tensors)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_inside_functorch_it_is_the_reference(transform):
    def loss(x):
        return torch.where(all_finite([x * 2]), x.sum(), 0.0)

    def right(x):
        return torch.where(ALL_FINITE.reference([x * 2]), x.sum(), 0.0)

    x = torch.ones(3, 2)
    assert torch.equal(transform(loss)(x), transform(right)(x))


def test_compiles_whole():
    torch.compiler.reset()
    compiled = torch.compile(all_finite, fullgraph=True, backend="aot_eager")
    bad = [torch.ones(5), torch.tensor([1.0, float("nan")])]
    assert compiled([torch.ones(5), torch.ones(2)])
    assert not compiled(bad)


def test_the_operator_is_registered_as_torch_asks():
    all_finite([torch.ones(1)])
    torch.library.opcheck(torch.ops.forge.all_finite.default, ([torch.ones(3), torch.ones(2, 2)],))


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
"""


@pytest.mark.slow
@needs_compiler
def test_what_the_page_says_of_cpp_stands_alone(run_python, repo, empty_folder):
    page = (repo / "docs" / "writing-kernels.md").read_text()
    blocks = re.findall(
        r"^```python\n(.*?)^```$", page.partition("## A kernel in C++")[2], flags=re.MULTILINE | re.DOTALL
    )
    path = empty_folder / "package" / "counting.py"
    path.parent.mkdir()
    path.write_text(WITHOUT_TRITON + "\n".join(blocks) + "\ntest_count_zeros_keeps_its_promises()\n")
    done = run_python(str(path), paths=[repo])
    assert done.returncode == 0, done.stderr


# -- building ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A C++ file that takes no time to compile, and an empty cache."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    path = tmp_path / "small.cpp"
    path.write_text('extern "C" int seven() { return 7; }\n')
    return path


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that gets a line from every run of the compiler that makes a library."""
    log, wrapper = tmp_path / "runs", tmp_path / "counting"
    wrapper.write_text(f'#!/bin/sh\ncase "$*" in *-shared*) echo run >> {log};; esac\nexec c++ "$@"\n')
    wrapper.chmod(0o755)
    log.touch()
    monkeypatch.setenv("CXX", str(wrapper))
    return log


@needs_compiler
def test_what_is_built_is_kept_until_the_source_changes(source, compiled):
    first = build.build(source)
    assert build.build(source) == first
    assert compiled.read_text().count("run") == 1
    source.write_text('extern "C" int seven() { return 8; }\n')
    assert build.build(source) != first
    assert compiled.read_text().count("run") == 2


@needs_compiler
def test_of_two_that_build_at_once_one_waits(source, compiled):
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(build.build, [source, source])
    assert first == second
    assert first.exists()
    assert compiled.read_text().count("run") == 1


@needs_compiler
def test_an_error_of_the_compiler_is_shown_and_kept(source):
    source.write_text("int seven() { return eight; }\n")
    with pytest.raises(KernelError, match=r"small\.cpp could not be compiled: .*eight.*small-\w+\.log") as raised:
        build.build(source)
    log = Path(str(raised.value).partition("full output in ")[2].rstrip(")"))
    assert "eight" in log.read_text()
    assert re.match(r"\S*(c\+\+|g\+\+|clang\+\+)\S* .*small\.cpp", log.read_text())  # the command comes first
    assert build.missing(source) == str(raised.value)
    assert not list(log.parent.glob("*.so"))


@needs_compiler
def test_a_cache_that_cannot_be_written_is_named(source, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    said = str(build.missing(source))
    assert f"small.cpp cannot be built in {tmp_path}/file/forge_small" in said
    assert "TORCH_EXTENSIONS_DIR names another folder" in said
    assert "Not a directory" in said


@needs_compiler
def test_a_library_that_cannot_be_loaded_is_done_without(source):
    source.write_text("extern int nowhere();\nint seven() { return nowhere(); }\n")
    assert "small.cpp was built but cannot be loaded" in str(build.missing(source))
