"""The order of samples, computed from the position. No list and no state are stored.

An epoch's order is a keyed permutation of `range(n)`. Any position is computed in constant time and memory, from the
key alone. A run therefore resumes at sample 10⁹ by arithmetic, and every rank and worker computes the same order.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

_WORD = (1 << 64) - 1
# Constants of SplitMix64, see mix64. Checkpoints depend on them.
_GAMMA = 0x9E3779B97F4A7C15
_MIX_A = 0xBF58476D1CE4E5B9
_MIX_B = 0x94D049BB133111EB
_NUM_ROUNDS = 6
_MIN_HALF_BITS = 3
# Words enciphered at once: six such buffers fit into a core's second-level cache, which makes numpy fast here.
_BLOCK = 8192


def mix64(value: int) -> int:
    """Return the SplitMix64 finaliser of `value` modulo 2⁶⁴: a fixed bijection of 64-bit words.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, section 5.
    """
    z = value & _WORD
    z = ((z ^ (z >> 30)) * _MIX_A) & _WORD
    z = ((z ^ (z >> 27)) * _MIX_B) & _WORD
    return z ^ (z >> 31)


def derive_key(key: int, index: int) -> int:
    """Return the `index`-th 64-bit word (`index` ≥ 0) of the SplitMix64 stream that starts at `key`."""
    return mix64(key + (index + 1) * _GAMMA)


def epoch_key(seed: int, epoch: int) -> int:
    """Return the 64-bit key of an epoch's order: `mix64(mix64(seed + γ) + (epoch + 1)·γ)`, γ = 0x9E3779B97F4A7C15.

    Args:
        seed: any integer, taken modulo 2⁶⁴.
        epoch: 0-based.
    """
    return derive_key(mix64(seed + _GAMMA), epoch)


class KeyedPermutation:
    """Pseudo-random permutation of `range(n)` that is computed, not stored.

    It is a cipher of the positions, which must never change, because positions in checkpoints depend on it:

    - Domain: words of 2h bits, h the least integer ≥ 3 with 2^(2h) ≥ n. A word is (left, right), h bits each, left
      high.
    - Keys: w(i) = mix64(key + (i + 1)·γ) mod 2⁶⁴ with γ = 0x9E3779B97F4A7C15 and mix64 the SplitMix64 finaliser.
      Round i of 0..5 has the odd multiplier a = w(2i) | 1 and the offset b = w(2i + 1).
    - Round: (left, right) → (right, left ⊕ F(right)), where, modulo 2⁶⁴, F(x) is: y = x·a + b; y = y ⊕ (y >> 32);
      y = y·0xBF58476D1CE4E5B9; the top h bits of y.
    - Six rounds, without undoing the last swap. A result ≥ n is enciphered again until it is < n ("cycle walking":
      Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002). A Feistel network is a bijection of its
      domain (Luby and Rackoff 1988), so the walk ends and is a bijection of `range(n)`.

    The permutation is for shuffling, not for encryption.

    Args:
        n: number of items; 0 to 2⁶².
        key: any integer, taken modulo 2⁶⁴; see `epoch_key`.

    Raises:
        ValueError: `n` is out of range.
    """

    def __init__(self, n: int, key: int) -> None:
        if not 0 <= n <= 1 << 62:
            raise ValueError(f"n={n} is not in [0, 2**62].")
        self.n = n
        self.key = key & _WORD
        # 1,000 items: 999 has 10 bits, so words have two halves of 5 bits. 2,000 items: 11 bits, halves of 6.
        self._half_bits = max(_MIN_HALF_BITS, (max(n - 1, 1).bit_length() + 1) // 2)
        self._rounds: list[tuple[np.uint64, np.uint64]] = []
        for i in range(_NUM_ROUNDS):
            multiplier = derive_key(self.key, 2 * i) | 1  # odd, so that multiplication is a bijection
            offset = derive_key(self.key, 2 * i + 1)
            self._rounds.append((np.uint64(multiplier), np.uint64(offset)))

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, place: int) -> int:
        """Return the item at `place`; raise IndexError outside [0, n)."""
        if not 0 <= place < self.n:
            raise IndexError(f"place {place} is not in [0, {self.n}).")
        return int(self.take([place])[0])

    def slice(self, start: int, stop: int) -> Indices:
        """Return the items at positions `start <= i < stop`, int64 of shape (stop - start,).

        Both ends are clipped to [0, n] first. The result is empty if `stop <= start`.
        """
        start = max(0, start)
        stop = min(stop, self.n)
        return self.take(np.arange(start, max(start, stop), dtype=np.uint64))

    def take(self, places: npt.ArrayLike) -> Indices:
        """Return the items at `places`, integers in [0, n) of any shape; int64 of the same shape."""
        words = np.array(places, dtype=np.uint64)
        flat = words.reshape(-1)
        limit = np.uint64(self.n)
        for first in range(0, flat.size, _BLOCK):
            block = flat[first : first + _BLOCK]
            block[:] = self._encipher(block)
        # Encipher the results ≥ n of all blocks again together. Separately for each block, most time would be spent on
        # the few words that remain after each pass.
        outside = np.flatnonzero(flat >= limit)
        while outside.size:
            for first in range(0, outside.size, _BLOCK):
                places_outside = outside[first : first + _BLOCK]
                flat[places_outside] = self._encipher(flat[places_outside])
            outside = outside[flat[outside] >= limit]
        return flat.reshape(words.shape).view(np.int64)

    def _encipher(self, words: _Words) -> _Words:
        """Return the words after six rounds. They may be ≥ n."""
        half = np.uint64(self._half_bits)
        top = np.uint64(64 - self._half_bits)  # a right shift by this number selects the top h bits
        left = words >> half
        right = words & np.uint64((1 << self._half_bits) - 1)
        mixed = np.empty_like(words)
        shifted = np.empty_like(words)
        # numpy's uint64 arithmetic is modulo 2⁶⁴. `out=` reuses two buffers, which stay in the cache (see _BLOCK).
        for multiplier, offset in self._rounds:
            np.multiply(right, multiplier, out=mixed)
            np.add(mixed, offset, out=mixed)
            np.right_shift(mixed, np.uint64(32), out=shifted)
            np.bitwise_xor(mixed, shifted, out=mixed)
            np.multiply(mixed, np.uint64(_MIX_A), out=mixed)
            np.right_shift(mixed, top, out=mixed)
            np.bitwise_xor(left, mixed, out=left)
            left, right = right, left
        np.left_shift(left, half, out=left)
        np.bitwise_or(left, right, out=left)
        return left


class SequentialOrder:
    """Order 0, 1, …, n - 1, with `n`, `slice` and `take` as in `ShuffledOrder`."""

    def __init__(self, n: int) -> None:
        self.n = n

    def slice(self, start: int, stop: int) -> Indices:
        """Return `start, …, stop - 1`, int64 of shape (stop - start,), after clipping both ends to [0, n]."""
        start = max(0, start)
        stop = min(stop, self.n)
        return np.arange(start, max(start, stop), dtype=np.int64)

    def take(self, places: npt.ArrayLike) -> Indices:
        """Return `places` themselves as int64."""
        return np.array(places, dtype=np.int64)


class ShuffledOrder(KeyedPermutation):
    """Shuffled order of one epoch: `KeyedPermutation(n, epoch_key(seed, epoch))`."""

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        super().__init__(n, epoch_key(seed, epoch))


SampleOrder = SequentialOrder | ShuffledOrder
