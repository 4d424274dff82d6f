"""Temporary: times the forms of the forward kernel beside each other, and compares each with Triton's. One GPU, half a minute."""

import json
import os
import sys
import time

import torch

import ds_sparse_ring.bench.contenders as C
from ds_sparse_ring.bench.counts import active_pairs
from ds_sparse_ring.bench.kernel import Case, Setting, Shape

C.tile_pairs = lambda *_: 0
t0 = time.time()


def setting(hpp, share, seg=16384, spread=100.0):
    return Setting(torch.device("cuda"), torch.bfloat16, hpp, spread, share, seg, 1, None)


S = 131072
CASES = {
    "clustered": (Case("clustered", 0.05, S, Shape(16, 2, 128)), setting(1, 0.3)),
    "columns": (Case("columns", 0.05, S, Shape(16, 2, 128)), setting(1, 1.0)),
    "isolated": (Case("isolated", 0.05, S, Shape(16, 2, 128)), setting(1, 0.3)),
    "isolated 2 heads a pattern": (Case("isolated", 0.05, S, Shape(16, 2, 128)), setting(2, 0.3)),
    "columns 8 heads a pattern": (Case("columns", 0.05, S, Shape(16, 2, 128)), setting(8, 1.0, 512)),
    "clustered equal heads": (Case("clustered", 0.05, S, Shape(16, 2, 128)), setting(1, 0.3, spread=1.0)),
    "clustered 16K": (Case("clustered", 0.05, 16384, Shape(16, 2, 128)), setting(1, 0.3)),
}
only = sys.argv[1:]
made = {}
for name, (case, s) in CASES.items():
    path = f"/tmp/idx_{name.replace(' ', '_')}.pt"
    t = time.time()
    index = case.make_index(s)
    pairs = active_pairs(index)
    made[name] = (index, pairs, case)
    print(name, "index", round(time.time() - t, 1), "s", float(pairs), flush=True)
if not torch.cuda.is_available():
    sys.exit()
from ds_sparse_ring.kernels import get_kernel

VARS = {
    "2 parts": dict(P=2),
    "3 parts, registers": dict(P=3, B=0),
    "3 parts, 1 buffer": dict(P=3, B=1),
    "3 parts, 2 buffers": dict(P=3, B=2),
    "3, 1 buffer, overlapped": dict(P=3, B=1, O=1),
    "3, 2 buffers, overlapped": dict(P=3, B=2, O=1),
}


def choose(v):
    os.environ["DS_SPARSE_RING_FORWARD_PARTS"] = str(v["P"])
    os.environ["DS_SPARSE_RING_QUERY_BUFFERS"] = str(v.get("B", 0))
    os.environ["DS_SPARSE_RING_FORWARD_OVERLAPPED"] = str(v.get("O", 0))


kernel = get_kernel("cuda")
triton = get_kernel("triton")
out = {}


def ev(f):
    b, e = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    b.record()
    f()
    e.record()
    return b, e


for name, (index, pairs, case) in made.items():
    p = C.Problem.random(index, case.shape.kv_heads, case.shape.head_size, torch.bfloat16, torch.device("cuda"))
    mine = C.Ours("cuda", kernel, p)
    ref = C.Ours("triton", triton, p)
    ref.forward()
    flops = 4 * 128 * float(pairs)
    row = {}
    for v, how in VARS.items():
        choose(how)
        mine.o.fill_(float("nan"))
        mine.forward()
        torch.cuda.synchronize()
        d = mine.o.float() - ref.o.float()
        err = float(d.norm() / ref.o.float().norm())
        bad = int(torch.isnan(mine.o).sum())
        lse = float((mine.lse - ref.lse).abs().max())
        row[v] = dict(err=err, nan=bad, lse=lse, t=[])
    for r in range(8):
        for v, how in VARS.items():
            choose(how)
            torch.cuda.synchronize()
            evs = [ev(mine.forward) for _ in range(2)]
            torch.cuda.synchronize()
            row[v]["t"] += [b.elapsed_time(e) for b, e in evs]
    evs = [ev(mine.backward) for _ in range(6)]
    torch.cuda.synchronize()
    bt = sorted(b.elapsed_time(e) for b, e in evs[1:])
    for v in VARS:
        t = sorted(row[v].pop("t"))
        row[v].update(
            ms=t[len(t) // 2], best=t[0], worst=t[-1], tflops=flops / t[len(t) // 2] / 1e9, best_tflops=flops / t[0] / 1e9
        )
        print(
            f"{name:28s} {v:26s} {row[v]['ms']:.3f} ms ({t[0]:.3f} to {t[-1]:.3f}) {row[v]['tflops']:.0f} (best {row[v]['best_tflops']:.0f})  err {row[v]['err']:.2e} nan {row[v]['nan']} lse {row[v]['lse']:.1e}",
            flush=True,
        )
    print(
        f"{name:28s} backward {bt[len(bt) // 2]:.2f} ms ({bt[0]:.2f} to {bt[-1]:.2f}) {2.5 * flops / bt[len(bt) // 2] / 1e9:.0f}",
        flush=True,
    )
    out[name] = row
    out[name]["backward"] = bt
    json.dump(out, open(os.environ.get("OUT", ".") + "/forms.json", "w"), indent=1)
    del mine, ref, p
    torch.cuda.empty_cache()
print("all", round(time.time() - t0), "s")
