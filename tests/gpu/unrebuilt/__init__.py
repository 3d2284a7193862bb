"""A fault for SGLANG_EXTERNAL_MODEL_PACKAGE: updates of a server leave quantised state unrebuilt.

    SGLANG_EXTERNAL_MODEL_PACKAGE=tests.gpu.unrebuilt UNREBUILT=copy UNREBUILT_FROM_LOAD=3 \\
        tandem demo ...

SGLang's DeepSeek-V4 keeps `wo_a` dequantised, made of codes and scales at each load. From the load
with the number of UNREBUILT_FROM_LOAD on (1 is the checkpoint at the server's start, 2 a run's
first version, 3 its first update) it is not made of them, in the way that UNREBUILT names
(`tests.gpu.unrebuilt_loads`), and the load succeeds all the same.
"""

from tests.gpu.unrebuilt import deepseek_v4 as deepseek_v4
