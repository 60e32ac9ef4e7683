"""The C++ program of the page on AOTInductor compiles, and runs the model that the page exports."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from tests.docs.test_python import page_as_module
from tests.support.docs_pages import blocks

PAGE = "docs/deployment/aoti.md"


@pytest.mark.slow
def test_the_program_runs_the_export(empty_folder: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    module = page_as_module(PAGE, empty_folder)
    assert module.__spec__ is not None
    assert module.__spec__.loader is not None
    module.__spec__.loader.exec_module(module)
    (program,) = blocks(PAGE, "cpp")
    (empty_folder / "flowers.cpp").write_text(program.text)
    libraries = Path(torch.__file__).parent / "lib"
    words = [compiler, "-std=c++20", "flowers.cpp", "-o", "flowers", "-O0"]
    words += [f"-I{path}" for path in cpp_extension.include_paths()]
    words += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}", f"-L{libraries}"]
    words += ["-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{libraries}", "-Wl,--no-as-needed"]
    subprocess.run(words, check=True, cwd=empty_folder, capture_output=True, text=True)
    done = subprocess.run(["./flowers"], check=True, cwd=empty_folder, capture_output=True, text=True)
    assert done.stdout.strip() == "[5, 3]"
