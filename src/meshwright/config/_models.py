"""Define the kinds of models: their keys, parameter counts in closed form, and what the axes split.

A new kind is a record below `ModelKind` here, listed in `Model`; its class, as
`trainer.models` says. What other packages ask of any model is a member of `ModelKind`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ._model_kind import MOST_UNROLLED, ModelKind, ModelSizes
from ._section import LARGEST, Positive
from ._transformer import TransformerModel


class LinearModel(ModelKind):
    """Linear regression: one row of `input_dim` numbers in, one number out."""

    takes = "rows"
    kind: Literal["linear"]
    """Kind of model. Effect: a single product of a vector and a number; for learning and for tests."""
    input_dim: Positive
    """Numbers in one row. Effect: as many parameters; `fsdp` must divide it. Unit: numbers"""
    bias: bool = False
    """Add a learned constant. Effect: one parameter more."""

    @property
    def num_parameters(self) -> int:
        """Number of parameters: D weights, and one bias if enabled."""
        return self.input_dim + int(self.bias)

    @property
    def num_matmul_parameters(self) -> int:
        """Number of parameters that multiply every row: D."""
        return self.input_dim

    @property
    def sizes(self) -> ModelSizes:
        """Sizes that other packages read."""
        return ModelSizes(
            input_shape=(self.input_dim,),
            split_dims={"embed": {"model.input_dim": self.input_dim}},
            layer_outputs=0,
            layer_outputs_rule="no layer before the output, so no activation",
            widest_activation=self.input_dim,
        )


class CruncherModel(ModelKind):
    """The deep linear model: `num_layers` maps of width D to D, then one to a single number; no biases."""

    takes = "rows"
    has_answer = False
    kind: Literal["cruncher"]
    """Kind of model. Effect: nothing but products of matrices, so that its figures can be counted by hand."""
    width: Positive
    """Numbers in one row, and in the result of every layer.
    Effect: parameters and FLOPs grow with its square; `fsdp` and `tensor` must divide it. Unit: numbers"""
    num_layers: Annotated[int, Field(ge=1, le=MOST_UNROLLED)]
    """Square maps before the last one.
    Effect: parameters, FLOPs and saved activations grow in proportion. Unit: layers"""

    @property
    def num_parameters(self) -> int:
        """Number of parameters: L D^2 + D."""
        return self.num_layers * self.width**2 + self.width

    @property
    def num_matmul_parameters(self) -> int:
        """Number of parameters that multiply every row: all L D^2 + D."""
        return self.num_parameters

    @property
    def sizes(self) -> ModelSizes:
        """Sizes that other packages read."""
        return ModelSizes(
            input_shape=(self.width,),
            split_dims={dim: {"model.width": self.width} for dim in ("embed", "mlp")},
            layer_outputs=self.width * self.num_layers,
            layer_outputs_rule="batch x width x layers",
            widest_activation=self.width,
        )


class LeNetModel(ModelKind):
    """LeNet for images of 28 x 28 pixels in one channel and ten classes; its sizes are fixed.

    Convolution 3 x 3 to 20 channels, ReLU, mean of 2 x 2; convolution 5 x 5 to 50 channels, ReLU, mean of
    2 x 2; 50 x 4 x 4 = 800 numbers to 128, ReLU, to 10 logits. No padding; a bias after each.
    """

    takes = "images"
    kind: Literal["lenet"]
    """Kind of model. Effect: a convolutional network of 129,068 parameters."""

    @property
    def num_parameters(self) -> int:
        """Number of parameters: 129,068, which are the weights and 20 + 50 + 128 + 10 biases."""
        return self.num_matmul_parameters + 20 + 50 + 128 + 10

    @property
    def num_matmul_parameters(self) -> int:
        """Number of weights: 128,860 = 20 x 1 x 3 x 3 + 50 x 20 x 5 x 5 + 800 x 128 + 128 x 10.

        A kernel multiplies at many positions of an image.
        """
        return 20 * 1 * 3 * 3 + 50 * 20 * 5 * 5 + 800 * 128 + 128 * 10

    @property
    def sizes(self) -> ModelSizes:
        """Sizes that other packages read; the outputs are 20 x 26 x 26, 50 x 9 x 9 and 128 numbers."""
        return ModelSizes(
            input_shape=(1, 28, 28),
            split_dims={"embed": {"the inputs of the hidden layer": 800}, "mlp": {"the hidden units": 128}},
            layer_outputs=20 * 26 * 26 + 50 * 9 * 9 + 128,
            layer_outputs_rule="images x outputs of the two convolutions and the hidden layer",
            widest_activation=20 * 28**2,
        )


class ResNetModel(ModelKind):
    """ResNet-18 for square images in one channel and ten classes; all its sizes but the image's are fixed."""

    takes = "images"
    kind: Literal["resnet18"]
    """Kind of model. Effect: a convolutional network of 11,173,578 parameters."""
    image_size: Annotated[int, Field(ge=32, le=LARGEST)]
    """Side of an image; image files are resized to it.
    Effect: FLOPs and saved activations grow with its square. Unit: pixels"""
    batch_norm: Literal["global", "replica"] = "global"
    """Rows over which training takes the statistics: the whole batch of a pass, or each replica's rows.
    Effect: `global` sums over the replicas in every normalisation, and gives one result on any layout."""

    @property
    def num_parameters(self) -> int:
        """Number of parameters: 11,173,578.

        They are the weights, two numbers for each of 3,904 normalised channels, and 10 biases. Normalised are
        the stem's 64 channels, and four times the 64, 128, 256 and 512 of the stages.
        """
        return self.num_matmul_parameters + 2 * (64 + 4 * (64 + 128 + 256 + 512)) + 10

    @property
    def num_matmul_parameters(self) -> int:
        """Number of weights in the kernels and the head.

        The stem has 49 x 64 and the head 512 x 10. A stage from C to D channels has 9 (C D + 3 D D) weights
        in kernels of 3 x 3. The three stages with C not equal to D have C D more in a kernel of 1 x 1.
        """
        stages = ((64, 64), (64, 128), (128, 256), (256, 512))
        kernels = sum(9 * (c * d + 3 * d * d) + (c * d if c != d else 0) for c, d in stages)
        return 49 * 64 + kernels + 512 * 10

    @property
    def sizes(self) -> ModelSizes:
        """Sizes that other packages read.

        The stem has 64 channels at half the image's side. Each stage has four convolutions of its width, and
        every stage but the first has a fifth, of size 1 x 1.
        """
        side = (self.image_size + 1) // 2
        outputs = 64 * side**2
        for width in (64, 128, 256, 512):
            side = (side + 1) // 2
            outputs += (4 if width == 64 else 5) * width * side**2
        return ModelSizes(
            input_shape=(1, self.image_size, self.image_size),
            split_dims={"embed": {"the inputs of the head": 512}},
            layer_outputs=outputs,
            layer_outputs_rule="images x outputs of the convolutions",
            widest_activation=64 * self.image_size**2,
        )


Model = Annotated[
    LinearModel | CruncherModel | LeNetModel | ResNetModel | TransformerModel, Field(discriminator="kind")
]
