import sys

from forge.registry import moved

sys.modules[__name__] = moved(__name__, "export", "serving.http_answers")
