"""What SGLANG_EXTERNAL_MODEL_PACKAGE names for GPU servers whose ranks share the attention heads.

SGLang passes over a module of it that it cannot import, and serves its own class instead. It does
import the package itself, so the module is imported here: an error ends the server at its start.
"""

from services.rollout.engine.sglang.gpu_model import deepseek_v4 as deepseek_v4
