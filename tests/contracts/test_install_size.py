"""Size limit of the base installation: the packages of ``pip install casemate`` and the embedder's weights."""

from importlib.util import find_spec

import pytest

from casemate.backends.embedders.minilm import INSTALL, PACKAGE

LIMIT_MB = 350  # docs/adr/0012-dependencies-of-the-base-install.md
EXTRAS = {"scipy", "onnx", "tokenizers", "huggingface-hub", "usearch", "torch", "scikit-learn", "httpx", "openai"}


@pytest.mark.skipif(find_spec(PACKAGE) is None, reason=f"needs {PACKAGE}: {INSTALL}")
def test_the_base_installation_stays_below_its_size_limit():
    from benchmarks.footprint import install_sizes

    sizes = install_sizes()
    assert 200 < sum(sizes.values()) <= LIMIT_MB, sizes
    assert not EXTRAS & sizes.keys()
