"""Bad input raises before anything is sent, naming the argument, what was found and what is allowed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import MODES, mesh_of, on_ranks
from jax.sharding import PartitionSpec as P

import echo_jax
from echo_jax import EchoConfig, collectives

pytestmark = pytest.mark.quick

RANKS, SHAPE = 2, (3, 64)
CONFIG = EchoConfig(algorithm="two_shot")
X = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
FUNCTIONS = {
    "echo_psum": echo_jax.echo_psum,
    "echo_psum_grad": echo_jax.echo_psum_grad,
    "flush": echo_jax.flush,
    "flush_grad": echo_jax.flush_grad,
}
each_function = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)


@pytest.fixture(autouse=True)
def nothing_is_sent(monkeypatch):
    def sent(*args):
        raise AssertionError("a sum was begun before all arguments were checked")

    monkeypatch.setattr(collectives, "_compensated_sum", sent)
    monkeypatch.setattr(collectives, "_add_debt", sent)


def refuses(f, error, *messages, mode="check_vma"):
    """f(), run as one of two ranks, raises `error` with every one of `messages` in its text."""
    with pytest.raises(error) as found:
        on_ranks(lambda _: f(), RANKS, mode)(np.zeros((RANKS, 1), np.float32))
    for message in messages:
        assert message in str(found.value)


def state_of(x=X, config=CONFIG):
    return echo_jax.init_state(x, "tp", config)


# --- configs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "found", "error", "allowed"),
    [
        ("codec", "int2", ValueError, "hadamard_int4"),
        ("algorithm", "ring", ValueError, "one_shot"),
        ("residual", "float16", ValueError, "bfloat16"),
        ("backend", "triton", ValueError, "xla"),
        ("backend", "pallas", ValueError, "xla"),
        ("group_size", 96, ValueError, "power of two"),
        ("group_size", 0, ValueError, "power of two"),
        ("group_size", 2048, ValueError, "1024"),
        ("group_size", 128.0, TypeError, "int"),
        ("group_size", True, TypeError, "int"),
        ("min_elements", -1, ValueError, "at least 0"),
        ("min_elements", 1.5, TypeError, "int"),
        ("feedback", 1, TypeError, "bool"),
        ("codec", ["int4"], ValueError, "int8"),
    ],
)
def test_a_config_names_the_field_what_was_found_and_what_is_allowed(field, found, error, allowed):
    with pytest.raises(error) as raised:
        EchoConfig(**{field: found})
    for part in (field, repr(found), allowed):
        assert part in str(raised.value)


def test_a_config_is_frozen_hashable_and_equal_to_its_like():
    assert hash(EchoConfig()) == hash(EchoConfig("hadamard_int4", 128)) and EchoConfig() == EchoConfig()
    assert EchoConfig() != EchoConfig(group_size=64)
    with pytest.raises(dataclasses.FrozenInstanceError):
        EchoConfig().codec = "int8"


@each_function
def test_a_config_of_another_type_is_refused(function):
    refuses(
        lambda: function(jnp.zeros(SHAPE), "tp", None, {"codec": "int4"}), TypeError, "config", "EchoConfig", "dict"
    )
    refuses(lambda: echo_jax.init_state(X, "tp", "int4"), TypeError, "config", "EchoConfig", "str")


# --- x ---------------------------------------------------------------------------------------------------------------


@each_function
@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64", "float8_e4m3fn"])
def test_an_x_that_is_not_a_float_of_16_or_32_bits_is_refused(function, dtype):
    x = jnp.zeros(SHAPE, dtype)
    refuses(lambda: function(x, "tp", state_of(), CONFIG), TypeError, "x must be", "float16, bfloat16, float32", dtype)
    refuses(lambda: state_of(x), TypeError, "x must be", "float16, bfloat16, float32", dtype)


@each_function
@pytest.mark.parametrize("x", [1.0, "x"])
def test_an_x_that_is_no_array_is_refused(function, x):
    refuses(lambda: function(x, "tp", state_of(), CONFIG), TypeError, "x must be an array", type(x).__name__)


@each_function
def test_a_leaf_of_a_pytree_is_named_by_its_path(function):
    x = {"a": jnp.zeros(SHAPE), "b": [jnp.zeros(SHAPE, int)]}
    state = {"a": X, "b": [X]}
    refuses(lambda: function(x, "tp", state_of(state), CONFIG), TypeError, "x['b'][0]", "int32")


@each_function
def test_an_x_of_another_shape_than_the_state_s_is_refused(function):
    refuses(lambda: function(jnp.zeros((3, 65)), "tp", state_of(), CONFIG), ValueError, "x", "(3, 64)", "(3, 65)")
    nested = {"a": jnp.zeros(SHAPE), "b": jnp.zeros((2, 2))}
    states = {"a": X, "b": X}
    refuses(lambda: function(nested, "tp", state_of(states), CONFIG), ValueError, "x['b']", "(3, 64)", "(2, 2)")


@each_function
def test_a_pytree_of_another_structure_than_the_state_s_is_refused(function):
    x = {"a": jnp.zeros(SHAPE), "b": jnp.zeros(SHAPE)}
    refuses(lambda: function(x, "tp", state_of(), CONFIG), ValueError, "structure")
    refuses(lambda: function(x, "tp", state_of({"a": X, "c": X}), CONFIG), ValueError, "structure", "'c'")
    refuses(lambda: function(x, "tp", {"a": state_of(), "b": 3.0}, CONFIG), TypeError, "EchoState", "float")
    refuses(lambda: function(x["a"], "tp", state_of([X]), CONFIG), ValueError, "structure")


# --- axes ------------------------------------------------------------------------------------------------------------


@each_function
@pytest.mark.parametrize("axis_name", ["model", ("tp", "model")])
def test_an_unknown_axis_is_refused(function, axis_name):
    refuses(
        lambda: function(jnp.zeros(SHAPE), axis_name, state_of(), CONFIG), ValueError, "axis_name", "'model'", "'tp'"
    )
    refuses(lambda: echo_jax.init_state(X, axis_name, CONFIG), ValueError, "axis_name", "'model'", "'tp'")


def test_a_call_outside_any_shard_map_says_so():
    for call in (
        lambda: echo_jax.init_state(X, "tp", CONFIG),
        lambda: echo_jax.echo_psum(jnp.zeros(SHAPE), "tp", None, EchoConfig(feedback=False)),
        lambda: echo_jax.echo_psum_grad(jnp.zeros(SHAPE), "tp", None, EchoConfig(feedback=False)),
    ):
        with pytest.raises(ValueError, match="axis_name .*'tp'.* not inside shard_map or vmap"):
            call()


# --- states ----------------------------------------------------------------------------------------------------------


@each_function
def test_a_state_is_needed_with_feedback_and_refused_without(function):
    x = jnp.zeros(SHAPE)
    refuses(lambda: function(x, "tp", None, CONFIG), ValueError, "state", "init_state", "feedback=True", "NoneType")
    without = dataclasses.replace(CONFIG, feedback=False)
    refuses(lambda: function(x, "tp", state_of(), without), ValueError, "state", "None", "feedback=False", "EchoState")


@each_function
@pytest.mark.parametrize(
    ("other", "field", "found", "wanted"),
    [
        (EchoConfig(group_size=32), "group_size", "32", "64"),
        (EchoConfig("int4"), "rotation", "'none'", "'hadamard'"),
        (EchoConfig(residual="float32"), "residual", "'float32'", "'int8'"),
    ],
)
def test_a_state_of_another_layout_is_refused_and_the_difference_named(function, other, field, found, wanted):
    def call():
        return function(jnp.zeros(SHAPE), "tp", state_of(config=other), CONFIG)

    refuses(call, ValueError, "state must have the layout", f"{field} {found} where the call has {wanted}")


@each_function
@pytest.mark.parametrize(
    ("axis", "size", "message"),
    [("a", 2, "axis_name 'a' where the call has 'tp'"), ("tp", 4, "ranks 4 where the call has 2")],
)
def test_a_state_of_other_ranks_or_another_axis_is_refused(function, axis, size, message):
    state = echo_jax.init_state(X, axis, CONFIG, mesh=mesh_of(**{axis: size}), spec=P())
    call = jax.shard_map(
        lambda state: function(jnp.zeros(SHAPE), "tp", state, CONFIG),
        mesh=mesh_of(tp=RANKS),
        in_specs=P("tp"),
        out_specs=P(),
    )
    with pytest.raises(ValueError, match=message):
        call(jax.tree.map(np.asarray, state))


@each_function
def test_a_state_that_was_not_sharded_over_the_axis_is_refused(function):
    state = echo_jax.init_state(X, "tp", CONFIG, mesh=mesh_of(tp=RANKS), spec=P())
    state = jax.tree.map(np.asarray, state)
    refuses(lambda: function(jnp.zeros(SHAPE), "tp", state, CONFIG), ValueError, "state.residual", "(1, 2, ", "(2, 2, ")


# --- the conjugates --------------------------------------------------------------------------------------------------


@each_function
def test_a_state_whose_array_is_not_of_its_layout_s_dtype_is_refused(function):
    def call():
        cast = jax.tree.map(lambda leaf: leaf.astype(jnp.int32), state_of())
        function(X, "tp", cast, CONFIG)

    refuses(call, ValueError, "state.residual must be float8_e4m3fn", "found int32")


@pytest.mark.parametrize("axis_name", [(), ("tp", "tp"), ["tp"], 0])
def test_what_cannot_name_an_axis_is_refused(axis_name):
    plain = dataclasses.replace(CONFIG, feedback=False)
    refuses(lambda: echo_jax.echo_psum(X, axis_name, None, plain), ValueError, "axis_name must be the name of an axis")


def test_an_array_is_no_state_and_a_shape_is_no_array():
    refuses(lambda: echo_jax.echo_psum(X, "tp", state_of().residual, CONFIG), TypeError, "state must be an EchoState")
    refuses(
        lambda: echo_jax.echo_psum(X, "tp", state_of(), CONFIG), TypeError, "x must be an array", "ShapeDtypeStruct"
    )


def test_init_state_outside_names_a_wrong_mesh_or_spec():
    mesh, x = mesh_of(tp=2), jnp.zeros((4, 64))
    with pytest.raises(TypeError, match="spec must be x's PartitionSpec"):
        echo_jax.init_state(x, "tp", CONFIG, mesh=mesh, spec=jax.NamedSharding(mesh, P()))
    with pytest.raises(TypeError, match="mesh must be"):
        echo_jax.init_state(x, "tp", CONFIG, mesh=mesh.abstract_mesh, spec=P())


@pytest.mark.parametrize(
    ("loss_fn", "args", "argnums", "message"),
    [
        (lambda p, s: p.sum(), (), 0, "loss_fn must return"),
        (lambda p, s: (p.sum(), s, 1), (), 0, "loss_fn must return"),
        (lambda p, s: (p.sum(), None), (), 0, "must return echo_jax.Streams"),
        (lambda p, s: (p, s), (), 0, "float scalar"),
        (lambda p, s: (p.sum(), s), (), 2, "argnums must be positions of the 2 arguments"),
        (lambda p, s, n: (p.sum(), s), (jnp.arange(3),), 2, "must be floats, found int32"),
    ],
)
def test_value_and_grad_says_what_is_wrong_with_a_loss_or_its_arguments(loss_fn, args, argnums, message):
    with pytest.raises(TypeError, match=message):
        echo_jax.value_and_grad(loss_fn, argnums)(jnp.ones(3), echo_jax.Streams(None, None), *args)


def test_value_and_grad_passes_keyword_arguments_on_and_takes_a_plain_number_for_a_loss():
    streams = echo_jax.Streams(None, None)
    value, grad, _ = echo_jax.value_and_grad(lambda p, s, *, factor: (factor * p, s))(2.0, streams, factor=3.0)
    assert (value, grad) == (6.0, 3.0)
    value, grad, _ = echo_jax.value_and_grad(lambda p, s: (1.0, s))(2.0, streams)
    assert (value, grad) == (1.0, 0.0)


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("function", [echo_jax.echo_psum_grad, echo_jax.flush_grad])
def test_the_conjugates_need_check_vma_and_say_so(function, mode):
    without = EchoConfig(feedback=False)
    refuses(lambda: function(jnp.zeros(SHAPE), "tp", None, without), ValueError, "check_vma=True", mode=mode)


@pytest.mark.parametrize("function", [echo_jax.echo_psum_grad, echo_jax.flush_grad])
def test_the_conjugates_refuse_an_x_that_varies_over_the_axis_already(function):
    def varying(x):
        return function({"h": x}, "tp", {"h": state_of()}, CONFIG)

    with pytest.raises(ValueError, match=r"x\['h'\] must not vary over 'tp'"):
        on_ranks(varying, RANKS)(np.zeros((RANKS, *SHAPE), np.float32))


# --- labels and the rest ---------------------------------------------------------------------------------------------


@each_function
def test_a_call_s_name_is_in_its_errors(function):
    def call(name):
        return function(jnp.zeros(SHAPE, int), "tp", state_of(), CONFIG, name=name)

    refuses(lambda: call("layer 3, attention"), TypeError, "layer 3, attention: x must be")
    refuses(lambda: call(None), TypeError, f"{function.__name__}: x must be")


@pytest.mark.parametrize("function", [echo_jax.echo_psum_grad, echo_jax.flush_grad])
def test_a_conjugate_s_name_is_in_the_errors_that_only_it_raises(function):
    without = EchoConfig(feedback=False)

    def call():
        return function(jnp.zeros(SHAPE), "tp", None, without, name="mlp_in")

    refuses(call, ValueError, "mlp_in", "check_vma", mode="vmap")


def test_init_state_outside_needs_mesh_and_spec_together_and_an_axis_of_the_mesh():
    mesh = mesh_of(tp=2)
    with pytest.raises(ValueError, match="spec must be x's PartitionSpec when mesh is given, found None"):
        echo_jax.init_state(X, "tp", CONFIG, mesh=mesh)
    with pytest.raises(ValueError, match="spec goes with mesh"):
        echo_jax.init_state(X, "tp", CONFIG, spec=P())
    with pytest.raises(ValueError, match=r"axis_name .* found 'model'; allowed: \('tp',\)"):
        echo_jax.init_state(X, "model", CONFIG, mesh=mesh, spec=P())


def test_residual_stats_need_a_state_and_a_y_of_its_shape():
    refuses(lambda: echo_jax.residual_stats(jnp.zeros(SHAPE), None), ValueError, "state", "EchoState", "None")
    refuses(lambda: echo_jax.residual_stats(jnp.zeros((2, 2)), state_of()), ValueError, "y", "(3, 64)", "(2, 2)")
    refuses(lambda: echo_jax.residual_stats([jnp.zeros(SHAPE)], state_of()), ValueError, "y", "structure")
