"""Matrix products on the host device: all epilogues, planning and recording as on a GPU."""

import numpy as np
import pytest
from hostdevice import HostDevice, HostDeviceError
from hostproducts import HostProducts

from distgpt.gpu.api import Product
from distgpt.gpu.dtypes import STORAGE, from_bfloat16, to_bfloat16


@pytest.fixture
def device():
    return HostDevice()


def array(device, host):
    on_device = device.zeros(host.shape, host.dtype)
    device.upload(on_device, host)
    return on_device


def product_of(m, n, k, a, b, transpose_a, transpose_b):
    """Sums by hand, in float64"""
    return np.array(
        [
            [
                sum(
                    float(a[x * m + i] if transpose_a else a[i * k + x])
                    * float(b[j * k + x] if transpose_b else b[x * n + j])
                    for x in range(k)
                )
                for j in range(n)
            ]
            for i in range(m)
        ]
    )


EPILOGUES = [("none", False), ("bias", False), ("gelu", False), ("gelu", True), ("dgelu", False)]


@pytest.mark.parametrize("kind", [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float64", "float64")])
@pytest.mark.parametrize("transpose", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("epilogue", [*EPILOGUES, ("column_sums", False)])
def test_products_have_all_epilogues(kind, transpose, epilogue):
    device, random = HostDevice(), np.random.default_rng(1)
    products = HostProducts(device)
    m, n, k = 5, 3, 7
    in_type, out_type = kind
    name, has_bias = epilogue
    accumulate = name in ("none", "column_sums")

    def stored(size, of):
        numbers = random.standard_normal(size).astype(np.float32)
        on_device = array(device, to_bfloat16(numbers) if of == "bfloat16" else numbers.astype(STORAGE[of]))
        return on_device, read(on_device)

    def read(on_device):
        host = device.download(on_device)
        return (from_bfloat16(host) if host.dtype == np.uint16 else host).astype(np.float64)

    (a, a_host), (b, b_host) = stored(m * k, in_type), stored(k * n, in_type)
    out, before = stored((m, n), out_type)
    bias, bias_host = stored(m if name == "column_sums" else n, out_type)
    aux, aux_host = stored((m, n), out_type)
    with_bias, with_aux = name in ("bias", "column_sums") or has_bias, name in ("gelu", "dgelu")
    product = Product(m, n, k, *transpose, in_type, out_type, name, accumulate, has_bias)
    products.run(product, out, a, b, bias if with_bias else None, aux if with_aux else None)

    wanted = product_of(m, n, k, a_host, b_host, *transpose)
    if name == "bias" or has_bias:
        wanted += bias_host
    close = {"rtol": 0.01, "atol": 0.02} if out_type == "bfloat16" else {"rtol": 1e-5, "atol": 1e-5}
    if accumulate:
        wanted += before
    if name == "column_sums":
        rows = a_host.reshape(k, m).sum(0) if transpose[0] else a_host.reshape(m, k).sum(1)
        assert np.allclose(read(bias), rows, **close)
    if name == "gelu":
        assert np.allclose(read(aux), wanted, **close)
        wanted = gelu(wanted)
    if name == "dgelu":
        wanted *= (gelu(aux_host + 1e-6) - gelu(aux_host - 1e-6)) / 2e-6
    assert np.allclose(read(out), wanted, **close)
    assert products.products == [product]


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def test_products_are_planned_before_they_are_recorded_and_then_repeated(device):
    products = HostProducts(device)
    a, b, out = (array(device, np.full((2, 2), 1.0)) for _ in range(3))
    product = Product(2, 2, 2, False, False, "float64", "float64", accumulate=True)
    unplanned = device.record(lambda: None if not device.recording else products.run(product, out, a, b))
    unplanned()
    with pytest.raises(HostDeviceError, match="planning cannot be recorded"):
        unplanned()
    recorded = device.record(lambda: products.run(product, out, a, b))
    for _ in range(4):
        recorded()
    assert np.all(device.download(out) == 9)


def test_products_refuse_what_they_cannot_do(device):
    products = HostProducts(device, without={"dgelu"})
    a, b, out = (array(device, np.ones((2, 2), np.float32)) for _ in range(3))
    plain = Product(2, 2, 2, False, False, "float32", "float32")
    assert products.can(plain) and products.can(Product(2, 2, 2, True, False, "float32", "float32", "gelu"))
    without = Product(2, 2, 2, False, False, "float32", "float32", "dgelu")
    assert not products.can(without)
    for product, arrays, message in (
        (without, (out, a, b, None, a), "no way"),
        (Product(2, 2, 2, False, False, "float32", "float32", "bias", True), (out, a, b, b), "no way"),
        (plain, (out, out, b), "a overlaps out"),
        (plain, (out, a, b[:1]), r"b is float32\[1, 2\]"),
        (plain, (out, a, b.T), "b is float32"),
        (plain, (out, a, np.ones((2, 2), np.float32)), "no array of this device"),
        (plain, (out, a, b, b[0]), "were given"),
        (Product(2, 2, 2, False, False, "bfloat16", "float32"), (out, a, b), "a is float32"),
        (Product(2, 2, 2, False, False, "float32", "float32", "bias"), (out, a, b), "were given"),
    ):
        with pytest.raises(HostDeviceError, match=message):
            products.run(product, *arrays)
