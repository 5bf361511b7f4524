"""The limit of BLAS threads covers every BLAS library that a search loads."""

import os
import subprocess
import sys

SCRIPT = """
import numpy as np
from threadpoolctl import threadpool_info
from casemate.maths.moments import quadratic_form
from casemate.runtime.blas_threads import single_blas_thread

with single_blas_thread():
    quadratic_form(np.eye(384), np.ones(384))
    print(*(library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"))
"""


def test_library_loaded_by_a_search_is_limited():
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {"1"}
