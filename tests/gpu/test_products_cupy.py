"""Matrix products through an array module alone: numpy in CuPy's place."""

import itertools
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from product_cases import EPILOGUES, PLAIN, TYPES, compute, operands

from distgpt.errors import UsageError
from distgpt.gpu.api import Product
from distgpt.gpu.products_cupy import CupyProducts

# Like CuPy's, and unlike numpy's, this matmul rounds to the type of its factors.
XP = SimpleNamespace(matmul=lambda a, b: np.matmul(a, b).astype(a.dtype), add=np.add)


@pytest.mark.parametrize("types", TYPES, ids="→".join)
@pytest.mark.parametrize("what", ["none", "none, accumulating", "bias"])
def test_an_array_module_alone_computes_plain_products(types, what):
    if "bfloat16" in types:
        pytest.importorskip("ml_dtypes")
    products = CupyProducts(XP)
    assert not products.recordable
    for ta, tb, m, n, k in itertools.product((False, True), (False, True), (1, 7), (1, 8, 13), (1, 9)):
        product = Product(m, n, k, ta, tb, *types, **EPILOGUES[what])
        assert products.can(product)
        compute(products, product, roundings=1 if what == "none" else 4)


def test_an_array_module_alone_refuses_epilogues_it_does_not_have():
    for epilogue in ("gelu", "dgelu", "column_sums"):
        product = replace(PLAIN, epilogue=epilogue)
        assert not CupyProducts(XP).can(product)
        with pytest.raises(UsageError, match=epilogue):
            CupyProducts(XP).run(product, **operands(product))


def test_bfloat16_without_ml_dtypes_is_refused_with_the_way_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    product = replace(PLAIN, in_type="bfloat16", out_type="bfloat16")
    with pytest.raises(UsageError, match="pip install ml_dtypes"):
        CupyProducts(XP).run(product, **operands(product))
