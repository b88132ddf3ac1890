"""Parameters: equality to the bit, after rounding, by fingerprint, and across ranks."""

import numpy as np
import pytest
import xxhash

from vllm_accprobe.align.derived import round_to_bfloat16
from vllm_accprobe.align.ranks import RankPiece, plan_merge
from vllm_accprobe.comparison.measure.measurer import _rounded, compare_params
from vllm_accprobe.comparison.measure.read import Loader
from vllm_accprobe.comparison.plan.unit import Group, Unit
from vllm_accprobe.dump.dtypes import SAMPLE, rounded_hashes, widen
from vllm_accprobe.dump.schema import REPLICATED, Layout, Payload, Record, Stats
from vllm_accprobe.standards.limits import Standard


class Store:
    def __init__(self):
        self.data = {}

    def read(self, record, out=None):
        return self.data[record.payload.off]


def group(store, pieces, *, dtype="float32", payload=True, sample=None, layouts=None, stats=None, hash=None,
          role="param.weight", rounded=None):
    records = []
    for rank, bits in enumerate(pieces):
        off = len(store.data)
        store.data[off] = bits
        layout = layouts[rank] if layouts else REPLICATED
        where = Payload(0, off, bits.nbytes) if payload else None
        records.append(
            Record(rank, None, "m", "Linear", role, 0, 0, dtype, bits.shape, None, 0, stats, hash, layout,
                   where, sample, rounded=rounded)
        )  # fmt: skip
    members = [RankPiece(r.rank, r.layout, r.shape, r.dtype, r.hash) for r in records]
    return Group(tuple(records), (0, None), None, plan_merge(members))


def run(golden, mine):
    store = Store()
    g, m = golden(store), mine(store)
    unit = Unit(("m", "param.weight", 0), ("m", "param.weight", 0), "Linear", "exact", 0, 0, [g], [m])
    return compare_params(unit, Loader(store), Loader(store), Standard())[0]


W = np.arange(24, dtype=np.float32).reshape(6, 4) / 7


def test_round_to_nearest_ties_to_even():
    # 1 + 2**-8 lies half-way between 1 and 1 + 2**-7: even is 1; 1 + 3 * 2**-8 goes up to 1 + 2**-6
    values = np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20, -2.5, 0, np.inf, np.nan], np.float32)
    got = widen(round_to_bfloat16(values), "bfloat16")
    np.testing.assert_array_equal(got, [1, 1 + 2.0**-6, 1 + 2.0**-7, -2.5, 0, np.inf, np.nan])


def test_rounding_to_eight_bits_finds_the_nearest():
    got = widen(_rounded(np.array([0.3, 1.06, 500.0], np.float32), "float32", "float8_e4m3fn"), "float8_e4m3fn")
    assert got.tolist() == [0.3125, 1.0, 448.0]


def test_equal_after_rounding_to_the_coarser_dtype():
    rounded = round_to_bfloat16(W)
    assert run(lambda s: group(s, [W]), lambda s: group(s, [rounded], dtype="bfloat16")).equal
    off = rounded.copy()
    off[2, 1] += 1
    result = run(lambda s: group(s, [off], dtype="bfloat16"), lambda s: group(s, [W]))
    assert result.equal is False
    assert result.worst[:2] == (2, 1)


@pytest.mark.parametrize("change", [0, 1])
def test_shards_against_the_whole(change):
    pieces = [W[:, :2].copy(), W[:, 2:].copy()]
    pieces[1][5, 1] += change
    layouts = [Layout("shard", "tp", k, 2, -1, ((2, 1),)) for k in range(2)]
    assert run(lambda s: group(s, [W]), lambda s: group(s, pieces, layouts=layouts)).equal is not bool(change)


def test_padding_of_a_vocabulary_is_cut_where_one_side_says_how_much_is_real():
    padded = np.concatenate([W, np.full((2, 4), 9, np.float32)])
    layouts = [Layout("shard", "tp", k, 2, 0, ((4, 1),), valid=6) for k in range(2)]
    shards = [padded[:4], padded[4:]]
    junk = np.concatenate([W, np.full((2, 4), -5, np.float32)])
    assert run(lambda s: group(s, [junk]), lambda s: group(s, shards, layouts=layouts)).equal
    assert run(lambda s: group(s, [W]), lambda s: group(s, shards, layouts=layouts)).equal
    assert run(lambda s: group(s, [junk]), lambda s: group(s, [W])).skip == "parameters: shapes differ"


def test_fingerprints():
    def bare(sample, **more):
        return lambda s: group(s, [W], payload=False, sample=sample, **more)

    assert run(bare("x"), bare("x")).equal is True
    assert run(bare("x"), bare("y")).equal is False
    stats = Stats(24, 0.0, 3.3, 1.6, 9.0, 0, 0)
    near = Stats(24, 0.0, 3.3, 1.6, 9.01, 0, 0)
    assert run(bare(None, stats=stats), bare(None, stats=near, dtype="bfloat16")).equal is True
    assert run(bare(None, stats=stats), bare(None, stats=Stats(24, 0.0, 3.3, 1.6, 9.9, 0, 0))).equal is False


def test_a_pack_of_float32_against_16_bits():
    def golden(values, **more):
        hashes = rounded_hashes(values)
        return lambda s: group(s, [values], payload=False, stats=Stats(24, *[1.0] * 4, 0, 0), rounded=hashes, **more)

    def mine(values, **more):
        bits = round_to_bfloat16(values)
        more = {"hash": xxhash.xxh3_128_hexdigest(bits)} | more
        return lambda s: group(s, [bits], dtype="bfloat16", stats=Stats(24, *[1.0] * 4, 0, 0), **more)

    other = W.copy()
    other[3, 1] *= 1.01
    for sides in ((golden(W), mine(W)), (mine(W), golden(W)), (golden(W), mine(W, payload=False))):
        found = run(*sides)
        assert (found.equal, found.by) == (True, "hash in 16 bits")
    found = run(golden(W), mine(other))
    assert (found.equal, found.by) == (False, "hash in 16 bits")
    assert run(golden(W), mine(other, role="param.cos_sin_cache")).by == "statistics"  # each run computes it
    assert run(golden(W), mine(other, hash="crc32:1")).by == "statistics"
    wide = np.arange(3 * SAMPLE, dtype=np.float32)
    sample = xxhash.xxh3_128_hexdigest(np.ascontiguousarray(round_to_bfloat16(wide)[::3]))
    assert run(golden(wide), mine(wide, hash=None, sample=sample)).equal
    large = np.arange((1 << 20) + SAMPLE, dtype=np.float32).reshape(2, -1)  # in two pieces
    bits = round_to_bfloat16(large)
    found = [f"bfloat16:{xxhash.xxh3_128_hexdigest(b.tobytes())}" for b in (bits, bits.reshape(-1)[::257])]
    assert rounded_hashes(large).split()[:2] == found


def test_packed_against_plain_is_skipped_with_its_reason():
    packed = np.zeros((6, 4), np.uint8)
    result = run(lambda s: group(s, [W]), lambda s: group(s, [packed], dtype="uint8"))
    assert (result.equal, result.skip) == (None, "packed or quantised parameters of different dtypes")


def test_one_checkpoint_loaded_as_float16_and_as_bfloat16_has_one_weight() -> None:
    rng = np.random.default_rng(3)
    truth = (rng.standard_normal((40, 64)) * 10.0 ** rng.uniform(-8, 1, (40, 64))).astype(np.float32)
    truth[7, 9] = 0.5

    def half(s: Store) -> Group:
        return group(s, [truth.astype(np.float16)], dtype="float16")

    for number, equal in ((0.5, True), (0.51, False)):
        other = truth.copy()
        other[7, 9] = number

        def brain(s: Store, other: np.ndarray = other) -> Group:
            return group(s, [round_to_bfloat16(other)], dtype="bfloat16")

        assert (run(half, brain).equal, run(brain, half).equal) == (equal, equal)
