from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.data.order import KeyedPermutation, ShuffledOrder, derive_key, epoch_key, mix64

GOLDEN_TEN = [2, 4, 6, 9, 7, 8, 0, 3, 1, 5]
GOLDEN_LARGE = [32121317467, 60575524022, 353494843430, 507878208663]
GOLDEN_KEYS = ["0x57e1faba65107204", "0xf4abd143feb24055"]

KEYS = st.integers(-(2**70), 2**70)


def reference(n: int, key: int, place: int) -> int:
    """The cipher in plain integers, written from its description alone."""
    word = 2**64
    half = 3
    while 1 << 2 * half < n:
        half += 1
    value = place
    while True:
        left, right = value >> half, value % (1 << half)
        for i in range(6):
            a = mix64(key + (2 * i + 1) * 0x9E3779B97F4A7C15) | 1
            b = mix64(key + (2 * i + 2) * 0x9E3779B97F4A7C15)
            y = (right * a + b) % word
            y ^= y >> 32
            y = y * 0xBF58476D1CE4E5B9 % word
            left, right = right, left ^ (y >> (64 - half))
        value = left << half | right
        if value < n:
            return value


@given(n=st.integers(0, 5000), key=KEYS)
@settings(max_examples=50)
def test_a_permutation_is_a_bijection(n: int, key: int) -> None:
    assert sorted(KeyedPermutation(n, key).slice(0, n).tolist()) == list(range(n))


@given(n=st.integers(1, 2**50), key=KEYS, data=st.data())
@settings(max_examples=50)
def test_it_is_the_documented_cipher(n: int, key: int, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, n - 1))
    assert KeyedPermutation(n, key)[place] == reference(n, key, place)


def test_its_values_never_change() -> None:
    assert KeyedPermutation(10, 0).slice(0, 10).tolist() == GOLDEN_TEN
    assert KeyedPermutation(10**12, 2026).slice(10**11, 10**11 + 4).tolist() == GOLDEN_LARGE
    for n in (64, 65, 255, 256, 257, 4**10):  # where the cipher's width changes
        assert KeyedPermutation(n, 7)[n // 2] == reference(n, 7, n // 2)
    assert [mix64(0), mix64(1), derive_key(0, 0)] == [0, 0x5692161D100B05E5, 0xE220A8397B1DCDAF]
    assert [hex(epoch_key(42, epoch)) for epoch in (0, 1)] == GOLDEN_KEYS


@given(n=st.integers(1, 3000), key=KEYS, data=st.data())
@settings(max_examples=50)
def test_a_slice_is_the_same_however_it_is_cut(n: int, key: int, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, n))
    permutation = KeyedPermutation(n, key)
    whole = permutation.slice(0, n).tolist()
    assert permutation.slice(0, cut).tolist() + permutation.slice(cut, n).tolist() == whole


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {tuple(ShuffledOrder(50, seed, epoch).slice(0, 50)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
