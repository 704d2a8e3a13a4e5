from __future__ import annotations
import torch
from torch import Tensor, nn
from ..batches import Batch, forward
from .products import Product, Walk
from .regression import Sums, choose
from ..types import Plan
import numpy as np

POSITIONS = 32


class Wiring(Walk):
    def __init__(self, model):
        super().__init__(model)
        self.outs = {}
        self.calls = {}
        self.bias = {}
        self.mean = {}
        self.sum_of = {}
        self.order = []
        self.taken = {}

    def product(self, p):
        out = p.run()
        n = p.name
        self.calls[n] = self.calls.get(n, 0) + 1
        if n not in self.outs:
            self.order.append(n)
        self.outs[n] = (out, out.clone().movedim(p.axis, -1).flatten(0, -2))
        if p.bias is not None:
            self.bias[n] = self.names.get(id(p.bias))
        return out

    def norm(self, source, out, mean):
        for n, (o, _) in self.outs.items():
            if o is source:
                self.mean[n] = mean

    def sum(self, pos, operands, in_place):
        for n, (o, z) in reversed(self.outs.items()):
            if n in self.sum_of:
                continue
            for side, t in enumerate(operands):
                if t.shape == o.shape and affine(z, t.movedim(1 if o.ndim > 2 and o.ndim == 4 else -1, -1).flatten(0, -2)):
                    self.sum_of[n] = (pos, side)
                    return


def affine(z, t):
    zc = z - z.mean(0)
    tc = t - t.mean(0)
    a = (zc * tc).sum(0) / zc.square().sum(0).clamp_min(1e-20)
    return bool(((tc - a * zc).square().sum() <= 1e-6 * tc.square().sum())) and z.shape[0] > 3


def kept(plan):
    gone = {}
    for s in plan.spaces:
        u = np.array(plan.removed[s.name], dtype=np.int64)
        for part in s.slices if u.size else ():
            gone.setdefault((part.tensor, part.dim), []).append(np.isin(part.owner, u))
    return {k: torch.from_numpy(np.flatnonzero(~np.logical_or.reduce(m))) for k, m in gone.items()}


class Targets(Walk):
    """original"""

    def __init__(self, model, todo, wiring, seed):
        super().__init__(model)
        self.todo = todo
        self.w = wiring
        self.gen = torch.Generator().manual_seed(seed)
        self.rows = {}
        self.per = {}
        self.values = {}
        self.at = {wiring.sum_of[n][0]: n for n in todo if n in wiring.sum_of}
        self.products = {}

    def product(self, p):
        out = p.run()
        if p.name in self.todo:
            total = out.numel() // out.shape[p.axis]
            n = out.shape[0]
            want = min(total, n * POSITIONS)
            self.per[p.name] = total // n
            self.rows[p.name] = torch.randperm(total, generator=self.gen)[:want].sort().values if want < total else torch.arange(total)
            if p.name not in self.w.sum_of:
                self.values[p.name] = p.outputs(out, self.rows[p.name])
            else:
                self.products[p.name] = p
        return out

    def sum(self, pos, ops, inp):
        n = self.at.get(pos)
        if n is not None:
            p = self.products.pop(n)
            r = self.rows[n]
            self.values[n] = p.outputs(ops[0], r) + p.outputs(ops[1], r)


class Refit(Walk):
    def __init__(self, small, wiring, keep, state, solve, todo):
        super().__init__(small)
        self.small = small
        self.w = wiring
        self.keep = keep
        self.state = state
        self.solve = solve
        self.todo = todo
        self.params = dict(small.named_parameters())
        self.bufs = dict(small.named_buffers())
        self.at = {wiring.sum_of[n]: n for n in todo if n in wiring.sum_of}
        self.pending = {}

    def start(self, targets):
        self.t = targets
        self.sums = 0

    def product(self, p):
        out = p.run()
        if p.name not in self.todo:
            return out
        rows = self.t.rows[p.name]
        z = p.outputs(out, rows)
        if p.name in self.w.sum_of:
            self.pending[self.w.sum_of[p.name][0]] = (p, out, z)
            return out
        target = self.t.values[p.name][:, self._keep(p)]
        self._update(p, z, target)
        return p.run() + self._shift(p)

    def _keep(self, p):
        k = self.keep.get((p.name, 1 - p.read_dim if p.weight.ndim == 2 or p.transposed else 0))
        return slice(None) if k is None else k

    def _shift(self, p):
        return 0

    def sum(self, pos, ops, inp):
        if pos not in self.pending:
            return
        p, out, z = self.pending.pop(pos)
        side = self.w.sum_of[p.name][1]
        rows = self.t.rows[p.name]
        o = p.outputs(ops[side], rows)
        s = p.outputs(ops[1 - side], rows)
        zc = z - z.mean(0)
        a = (zc * (o - o.mean(0))).sum(0) / zc.square().sum(0).clamp_min(1e-20)
        drift = self.t.values[p.name][:, self._keep(p)] - (o + s)
        target = z + torch.where(a.abs() > 1e-6 * a.abs().max(), drift / a, 0)
        off0 = self._off(p)
        self._update(p, z, target)
        dz = p.run() - out
        shape = [1] * dz.ndim
        shape[p.axis] = -1
        dz = (dz + self.doff.view(shape)) * a.view(shape)
        ops[side] = ops[side].add_(dz) if inp and side == 0 else ops[side] + dz

    def _off(self, p):
        return None

    def _update(self, p, z, target):
        st = self.state.setdefault(p.name, {})
        if "w0" not in st:
            st["w0"] = p.matrix(self.params[p.name].detach()).clone().double()
            st["halves"] = None
            st["name"] = self.w.bias.get(p.name)
            st["mean"] = self.w.mean.get(p.name) if st["name"] is None else None
            b = self.params[st["name"]] if st["name"] else self.bufs[st["mean"]] if st["mean"] else None
            st["b0"] = None if b is None else b.detach().clone().double()
            st["off"] = torch.zeros(p.run().shape[p.axis], dtype=torch.float64)
        rows = self.t.rows[p.name]
        x = p.features(rows).flatten(2)  # [G,rows,p]
        G = x.shape[0]
        # current z includes bias_cur; effective offset so far st['off'] in bias case already in z; in mean case not
        w0 = st["w0"].flatten(1, 2).to(x)
        base = x @ w0  # [G,rows,q]
        tgt = target.unflatten(1, (G, -1)).transpose(0, 1)
        if st["name"]:
            tgt = tgt - st["b0"].view(G, 1, -1).to(x)
        if st["mean"]:
            pass
        # mean case: z has no offset; effective target for z+off : target computed from z + drift/a where o used current mean => z_eff = z+off
        if st["mean"] and p.name in self.w.sum_of:
            tgt = tgt + st["off"].view(G, 1, -1).to(x)
        r = tgt - base
        even = (rows // self.t.per[p.name]) % 2 == 0
        new = (Sums.of(x[:, even], r[:, even]), Sums.of(x[:, ~even], r[:, ~even]))
        st["halves"] = new if st["halves"] is None else (st["halves"][0] + new[0], st["halves"][1] + new[1])
        self.doff = torch.zeros_like(st["off"]).to(x)
        if not self.solve:
            return
        c = choose(st["halves"], st["b0"] is not None)
        st["err"] = (c.before, c.after)
        if c.fit is None:
            return
        with torch.no_grad():
            par = self.params[p.name]
            par.copy_(p.stored(st["w0"] + c.fit.slope.unflatten(1, st["w0"].shape[1:3]), par))
            off = c.fit.offset.flatten()
            if st["name"]:
                self.params[st["name"]].copy_(st["b0"] + off)
            elif st["mean"]:
                self.bufs[st["mean"]].copy_(st["b0"] - off)
                self.doff = (off - st["off"]).to(x)
            st["off"] = off


def sequential(small, model, plan, batches, *, everything=False, sweeps=1, schedule="double"):
    first = batches[0]
    w = Wiring(model)
    with torch.no_grad(), w:
        forward(model, first.rows(0, 4))
    k = kept(plan)
    if everything:
        todo = {n for n in w.order if w.calls[n] == 1}
    else:
        todo = {part.tensor for s in plan.spaces if plan.removed[s.name] for part in s.slices_of("read")}
    todo = {n for n in todo if w.calls.get(n) == 1}
    state = {}
    for sweep in range(sweeps):
        if sweep:
            for st in state.values():
                st["halves"] = None
        for i, b in enumerate(batches):
            with torch.no_grad():
                t = Targets(model, todo, w, i)
                with t:
                    forward(model, b)
                solve = schedule == "all" or (i & (i + 1)) == 0 or i == len(batches) - 1
                if sweep and not (i == len(batches) - 1 or solve and i > 2):
                    solve = False
                r = Refit(small, w, k, state, solve, todo)
                r.start(t)
                with r:
                    forward(small, b)
    return small, state
