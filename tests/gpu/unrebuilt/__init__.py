"""A fault for SGLANG_EXTERNAL_MODEL_PACKAGE: updates of a server leave quantised state unrebuilt.

    SGLANG_EXTERNAL_MODEL_PACKAGE=tests.gpu.unrebuilt UNREBUILT_FROM_LOAD=2 tandem demo ...

SGLang's DeepSeek-V4 keeps `wo_a` dequantised, made of codes and scales at each load. From the load
with the number of UNREBUILT_FROM_LOAD on (1 is the checkpoint at the server's start, updates come
after it) this copy is left as it was, and the load succeeds all the same.
"""

from tests.gpu.unrebuilt import deepseek_v4 as deepseek_v4
