"""Stands where SGLang's compiled kernels would be, so that its Python imports without a GPU.

Any kernel can be imported by name, under any submodule, and fails by name when it is called.
"""

import importlib.abc
import importlib.machinery
import sys
import types

import torch

__version__ = "0.0.0+cpu"


class _Absent:
    """A kernel that is not there; also its attributes are not there."""

    def __init__(self, name):
        self.__name__ = self._name = name

    def __getattr__(self, attribute):
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return _Absent(f"{self._name}.{attribute}")

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"{self._name} is a compiled kernel; this server has none")


def _absent_from(module_name):
    def get(attribute):
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return _Absent(f"{module_name}.{attribute}")

    return get


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        if not fullname.startswith("sgl_kernel."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = _absent_from(spec.name)
        module.is_arch_support_pdl = lambda: False
        return module

    def exec_module(self, module):
        pass


def _bind_threads(cores: str) -> str:
    torch.set_num_threads(1)
    return f"one thread, cores {cores}"


__getattr__ = _absent_from("sgl_kernel")
sys.meta_path.append(_Submodules())
_LIBRARY = torch.library.Library("sgl_kernel", "FRAGMENT")
_LIBRARY.define("init_cpu_threads_env(str ids) -> str")
_LIBRARY.impl("init_cpu_threads_env", _bind_threads, "CompositeExplicitAutograd")
if not hasattr(torch.cpu.Stream, "synchronize"):
    torch.cpu.Stream.synchronize = lambda self: None
