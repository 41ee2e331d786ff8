"""Every operation through argosy and through Gloo, on the same tensors: the results must be the same."""

# ruff: noqa: F821, B023, B007 (names that the crew gives; lambdas are called at once)
import itertools

world = form(device_id=None)
gloo = dist.new_group(backend="gloo")
peers = list(range(size))

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.uint8, torch.int32, torch.int64]
SHAPES = [(), (0,), (5, 3), (4099,), (300_001,)]  # the last is larger than what a rank may run ahead
SUM, OTHERS = dist.ReduceOp.SUM, [dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX]
BITS = [dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR]
case = 0


def filled(shape, dtype, seed=0):
    global case
    case += 1
    generator = torch.Generator().manual_seed(case * 97 + rank + seed)
    if dtype.is_floating_point:
        return torch.rand(shape, generator=generator, dtype=torch.float32).add(0.5).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 7, shape, generator=generator).to(dtype)


def same(operation, *tensors):
    """Run the operation on two copies of the tensors."""
    ours = [tensor.clone() for tensor in tensors]
    theirs = [tensor.clone() for tensor in tensors]
    operation(world, *ours)
    operation(gloo, *theirs)
    for mine, other in zip(ours, theirs, strict=True):
        # Gloo rounds half and bfloat16 after each addition, argosy once.
        loose = {"rtol": 4e-2, "atol": 1e-2} if mine.dtype in (torch.float16, torch.bfloat16) else {}
        torch.testing.assert_close(mine, other, **loose)


for dtype, shape in itertools.product([*FLOATS, *INTEGERS, torch.bool], SHAPES):
    if shape == SHAPES[-1] and dtype not in (torch.float32, torch.float64, torch.bfloat16):
        continue
    kind = SUM if dtype != torch.bool else dist.ReduceOp.MAX
    same(lambda g, x: dist.all_reduce(x, kind, group=g), filled(shape, dtype))
    same(lambda g, x: dist.broadcast(x, size - 1, group=g), filled(shape, dtype))
for dtype, operation in [
    *itertools.product([*FLOATS, *INTEGERS], OTHERS),
    *itertools.product(INTEGERS, BITS),
]:
    same(lambda g, x, op=operation: dist.all_reduce(x, op, group=g), filled((4099,), dtype))
for dtype, shape in itertools.product([torch.float32, torch.bfloat16, torch.int64, torch.bool], SHAPES):
    x, many = filled(shape, dtype), [filled(shape, dtype, seed) for seed in range(size)]
    same(lambda g, x, *out: dist.all_gather(list(out), x, group=g), x, *many)
    same(lambda g, x, *out: dist.gather(x, list(out) if rank == 1 else None, 1, group=g), x, *many)
    same(lambda g, x, *given: dist.scatter(x, list(given) if rank == 1 else None, 1, group=g), x, *many)
    whole = torch.empty(size * x.numel(), dtype=dtype)
    same(lambda g, x, out: dist.all_gather_single(out.zero_(), x.reshape(-1), group=g), x, whole)
    if dtype != torch.bool:
        same(lambda g, x, *given: dist.reduce_scatter(x, list(given), group=g), x, *many)
        same(
            lambda g, x, out: dist.reduce_scatter_single(out, x, group=g),
            filled((size * x.numel(),), dtype),
            x.reshape(-1),
        )
        same(lambda g, x: (dist.reduce(x, 1, group=g), x.zero_() if rank != 1 else None), filled(shape, dtype))

for length in (0, 3, 50_000):
    spread = [[(source + target) % 3 * length + target for target in peers] for source in peers]
    given, taken = spread[rank], [spread[source][rank] for source in peers]
    x = filled((sum(given), 2), torch.float32)
    out = torch.zeros(sum(taken), 2)
    same(lambda g, out, x: dist.all_to_all_single(out, x, taken, given, group=g), out, x)
    parts = [filled((count,), torch.int64) for count in given]
    empty = [torch.zeros(count, dtype=torch.int64) for count in taken]
    ours = [t.clone() for t in empty]
    dist.all_to_all(ours, [p.clone() for p in parts], group=world)
    flat = torch.zeros(sum(taken), dtype=torch.int64)
    dist.all_to_all_single(flat, torch.cat(parts), taken, given, group=gloo)
    assert torch.equal(torch.cat(ours), flat)
even = filled((size * 1000,), torch.float32)
same(lambda g, out, x: dist.all_to_all_single(out, x, group=g), torch.zeros_like(even), even)

# Tensors that are not contiguous, that need a gradient, complex ones.
x = filled((6, 8), torch.float32).t()
total = x.clone()
dist.all_reduce(x)
dist.all_reduce(total := total.contiguous(), group=gloo)
torch.testing.assert_close(x, total)
leaf = torch.nn.Parameter(torch.full((3,), float(rank)))
dist.broadcast(leaf.data, 0)
assert torch.equal(leaf.detach(), torch.zeros(3))
z = torch.complex(torch.ones(3), torch.full((3,), float(rank)))
dist.all_reduce(z)
assert torch.equal(z.imag, torch.full((3,), float(sum(peers))))

# Works and futures; several at once stay in order.
works = [(dist.all_reduce(x := torch.full((1000,), float(i)), async_op=True), x, i) for i in range(20)]
for work, x, i in works:
    future = work.get_future()
    assert work.wait()
    assert work.is_completed()
    assert torch.equal(future.wait()[0], torch.full((1000,), float(i * size)))
mean = torch.full((5,), float(rank))
dist.all_reduce(mean, dist.ReduceOp.AVG)
assert torch.equal(mean, torch.full((5,), sum(peers) / size))

# Point to point: a ring, both ways at once, tags out of order, from anybody.
right, left = (rank + 1) % size, (rank - 1) % size
for count in (0, 1, 500_000):
    sent, got = torch.full((count,), float(rank)), torch.empty(count)
    batch = [dist.P2POp(dist.isend, sent, right), dist.P2POp(dist.irecv, got, left)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    assert torch.equal(got, torch.full((count,), float(left)))
if rank == 0:
    first, second = dist.isend(torch.tensor([1.0]), 1, tag=1), dist.isend(torch.tensor([2.0]), 1, tag=2)
    first.wait(), second.wait()
    for _ in range(size - 1):
        source = dist.recv(x := torch.empty(4))
        assert torch.equal(x, torch.full((4,), float(source)))
elif rank == 1:
    b, a = torch.empty(1), torch.empty(1)
    dist.recv(b, 0, tag=2), dist.recv(a, 0, tag=1)
    assert (a.item(), b.item()) == (1.0, 2.0)
if rank:
    dist.send(torch.full((4,), float(rank)), 0)

# Objects, groups within the group.
objects = [None] * size
dist.all_gather_object(objects, {"rank": rank, "x": "y" * rank * 1000})
assert [o["rank"] for o in objects] == peers
held = [{"a": 1} if rank == 0 else None]
dist.broadcast_object_list(held, 0)
assert held == [{"a": 1}]
pair = dist.new_group([0, size - 1])
if rank in (0, size - 1):
    dist.all_reduce(x := torch.ones(3), group=pair)
    assert torch.equal(x, torch.full((3,), 2.0))
for _ in range(2):
    half = world.split_group(peers[:2] if rank < 2 else peers[2:])
    half.allreduce([x := torch.ones(3)]).wait()
    assert torch.equal(x, torch.full((3,), float(2 if rank < 2 else size - 2)))
assert world.split_group([right]) is None
part = dist.split_group(split_ranks=[[0], peers[1:]])
dist.all_reduce(x := torch.ones(3), group=part)
assert torch.equal(x, torch.full((3,), float(size - 1 if rank else 1)))
dist.monitored_barrier()
alone = dist.new_group([rank], use_local_synchronization=True)
dist.all_reduce(x := torch.ones(3), group=alone)
assert torch.equal(x, torch.ones(3))

# Errors where Gloo errs; the group goes on.
for call in (
    lambda g: dist.all_reduce(torch.ones(3, dtype=torch.int16), group=g),
    lambda g: dist.all_gather_single(torch.ones(size * 3 + 1), torch.ones(3), group=g),
    lambda g: dist.reduce_scatter_single(torch.ones(3), torch.ones(size * 3 + 1), group=g),
):
    for group in (world, gloo):
        try:
            call(group)
        except (RuntimeError, ValueError):
            continue
        raise AssertionError(f"no error through {group.name()}")
dist.barrier()
dist.destroy_process_group()
print("good")
