"""Both directions of a training step: forward and backward streams, and the derivative that carries them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp

from echo_jax import axes
from echo_jax.axes import AxisName
from echo_jax.config import EchoConfig
from echo_jax.state import init_state


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Streams:
    """What the two directions of a training step owe.

    Attributes:
      forward: state (an EchoState, a pytree of them, or None) for `echo_psum`: what the activations owe.
      backward: state for `echo_psum_grad`: what their gradients owe.
      loss_scale: static; what `value_and_grad` multiplied the loss by when this was owed backward. None for new streams
        that any scale may begin with, 'changing' for those of a traced scale, which no call takes.
    """

    forward: Any
    backward: Any
    loss_scale: float | str | None = dataclasses.field(default=1.0, metadata={"static": True})


def init_streams(
    x: Any,
    axis_name: AxisName,
    config: EchoConfig,
    backward_config: EchoConfig | None = None,
    *,
    mesh: jax.sharding.Mesh | None = None,
    spec: Any = None,
    loss_scale: float | None = 1.0,
) -> Streams:
    """Zero states for both directions of a stream of activations like x. Arguments as for `init_state`.

    `backward_config` is what `echo_psum_grad` and `flush_grad` are called with; by default `config`. `loss_scale` is
    that of the `value_and_grad` which the streams go through; None if it is traced.
    """
    backward_config = config if backward_config is None else backward_config
    return Streams(
        init_state(x, axis_name, config, mesh=mesh, spec=spec),
        init_state(x, axis_name, backward_config, mesh=mesh, spec=spec),
        loss_scale,
    )


def value_and_grad(
    loss_fn: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    loss_scale: float | jax.Array = 1.0,
) -> Callable[..., Any]:
    """`jax.value_and_grad` for a loss whose streams carry residuals in both directions.

    The backward residual travels in the cotangent of `streams.backward`: what was carried in enters as the seed of the
    returned state's cotangent, and the cotangent of the given state is what is owed at the end.

    Args:
      loss_fn: (params, streams, *args) -> (loss, streams), or (loss, (streams, aux)) with `has_aux`. loss is a float
        scalar. It passes `streams.forward` through `echo_psum` and `streams.backward` through `echo_psum_grad`, and
        returns both.
      argnums: position, or positions, of the arguments to differentiate; not 1, which are the streams.
      has_aux: whether loss_fn returns more.
      loss_scale: what gradients are multiplied by on their way, so that small ones do not vanish in float16; those
        returned, and the loss, are not scaled. The backward residual is, and what is owed at one scale is wrong at
        another: streams that were carried from one are refused. A traced scale may be another one in every call, so it
        needs streams made for the step (`init_streams(..., loss_scale=None)`), and none takes those that it returns:
        settle them.

    Returns:
      A function of loss_fn's arguments that returns (value, grads, streams): value is the loss, or (loss, aux); both
      residuals in streams are new.

    Raises:
      TypeError: argnums names the streams, loss_fn does not return Streams of the structure that it was given.
      ValueError: streams carried over a change of the loss scale; a scale that is not above 0.
    """
    traced = isinstance(loss_scale, jax.core.Tracer)
    if not traced and not 0 < float(loss_scale) < float("inf"):
        raise ValueError(f"loss_scale must be above 0 and finite, found {loss_scale}")
    scale_after = "changing" if traced else float(loss_scale)
    positions = argnums if isinstance(argnums, tuple) else (argnums,)
    if 1 in positions or any(isinstance(p, bool) or not isinstance(p, int) or p < 0 for p in positions):
        raise TypeError(f"argnums must be positions from 0 other than 1, which is the streams'; found {argnums!r}")

    def value_and_grad_fn(*args: Any, **kwargs: Any) -> tuple[Any, Any, Streams]:
        if len(args) < 2 or not isinstance(args[1], Streams):
            found = type(args[1]).__name__ if len(args) > 1 else "nothing"
            raise TypeError(f"streams, the second argument, must be echo_jax.Streams, found {found}")
        streams = args[1]
        _check_scale(streams, scale_after)
        if max(positions) >= len(args):
            raise TypeError(f"argnums must be positions of the {len(args)} arguments given, found {argnums!r}")
        for path, leaf in jax.tree_util.tree_leaves_with_path({p: args[p] for p in positions}):
            if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
                where = jax.tree_util.keystr(path)
                raise TypeError(f"arguments to differentiate must be floats, found {jnp.result_type(leaf)} at {where}")

        def run(differentiated: tuple[Any, ...], backward: Any) -> tuple[Any, Any]:
            full = list(args)
            full[1] = dataclasses.replace(streams, backward=backward)
            for position, value in zip(positions, differentiated, strict=True):
                full[position] = value
            result = loss_fn(*full, **kwargs)
            try:
                loss, rest = result
                new_streams, aux = rest if has_aux else (rest, None)
            except (TypeError, ValueError) as error:
                wanted = "(loss, (streams, aux))" if has_aux else "(loss, streams)"
                raise TypeError(f"loss_fn must return {wanted}, found {jax.tree.structure(result)}") from error
            if not isinstance(new_streams, Streams):
                raise TypeError(
                    f"loss_fn must return echo_jax.Streams beside the loss, found {type(new_streams).__name__}"
                )
            new_streams = dataclasses.replace(new_streams, loss_scale=streams.loss_scale)
            given, found = jax.tree.structure(streams), jax.tree.structure(new_streams)
            if given != found:
                raise TypeError(f"loss_fn must return streams of the structure {given}, found {found}")
            return (jnp.asarray(loss), new_streams.backward), (new_streams.forward, aux)

        (loss, backward_out), transpose, (forward, aux) = jax.vjp(
            run, tuple(args[p] for p in positions), streams.backward, has_aux=True
        )
        if loss.shape or not jnp.issubdtype(loss.dtype, jnp.floating):
            raise TypeError(f"loss_fn must return a float scalar as its loss, found {loss.dtype}{list(loss.shape)}")
        scale = jnp.asarray(loss_scale, loss.dtype)
        seed = axes.match_varying(jnp.ones_like(loss) * scale, loss)
        carried = jax.tree.map(axes.match_varying, streams.backward, backward_out)
        grads, backward = transpose((seed, carried))
        if scale_after != 1.0:
            grads = jax.tree.map(lambda g: (g / scale).astype(g.dtype), grads)
        value = (loss, aux) if has_aux else loss
        return value, grads if isinstance(argnums, tuple) else grads[0], Streams(forward, backward, scale_after)

    return value_and_grad_fn


def _check_scale(streams: Streams, scale: float | str) -> None:
    if streams.backward is None or streams.loss_scale is None or streams.loss_scale == scale != "changing":
        return
    made = "a traced loss_scale" if streams.loss_scale == "changing" else f"loss_scale={streams.loss_scale}"
    wanted = "init_streams(..., loss_scale=None), anew in every step" if scale == "changing" else f"loss_scale={scale}"
    raise ValueError(
        f"streams must be of {wanted}; found those of {made}: what they owe backward is of another scale. Settle them "
        f"with flush_grad and begin with new ones"
    )
