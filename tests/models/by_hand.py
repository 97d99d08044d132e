"""Formulas of the papers in NumPy and float64, for one image.

They share nothing with the package except the names of parameters.
"""

import math

import jax
import numpy as np
import scipy.special


def randomised(tree, seed=0):
  """Returns NumPy arrays of the shapes of `tree`, large enough to matter."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda x: rng.normal(0, 0.5, x.shape).astype(np.float32), tree
  )


def softmax(x):
  return np.exp(x) / np.exp(x).sum(-1, keepdims=True)


def layer_norm(x, params):
  x = np.asarray(x, np.float64)
  x = x - x.mean(-1, keepdims=True)
  x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
  return x * params['scale'] + params['bias']


def dense(x, params):
  return x @ params['kernel'] + params['bias']


def mlp(x, params, gelu='tanh'):
  x = dense(x, params['Dense_0'])
  if gelu == 'tanh':
    x = x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
  else:
    x = x * scipy.special.ndtr(x)
  return dense(x, params['Dense_1'])


def attention(x_LD, params, extra=0):
  """Appendix A, with the relative keys of appendix D.4 if `params` has them.

  The product of a query and the embedding of an offset between patches is added
  to the logits. The patches come after `extra` tokens.
  """
  L = len(x_LD)
  y_LD, weights = 0, []
  for n, out in enumerate(params['out']['kernel']):
    q, k, v = (
      x_LD @ params[name]['kernel'][:, n] + params[name]['bias'][n]
      for name in ('query', 'key', 'value')
    )
    logits = q @ k.T
    if 'relative' in params:
      r = params['relative']['relative_embedding'][:, n]
      assert len(r) == 2 * (L - extra) - 1
      for i in range(extra, L):
        for j in range(extra, L):
          # The smallest offset, patches - 1 to the left, comes first.
          logits[i, j] += q[i] @ r[i - j + L - extra - 1]
    weights.append(softmax(logits / math.sqrt(q.shape[1])))
    y_LD = y_LD + weights[-1] @ v @ out
  return y_LD + params['out']['bias'], np.array(weights)
