"""Finding: one thing that is wrong with a training, by a name that stays; and the table of all names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from forge.errors import ForgeError

LEVELS = ("error", "warning", "note")
"""An error cannot be meant; a warning is nearly always wrong; a note is worth a look."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong, where, by which numbers, and what to do."""

    name: str
    "A key of FINDINGS, or a name of another package's, which gives level and cure itself."
    message: str
    "What is wrong."
    where: str = ""
    "The user's line, or the name of a module, a parameter or a loader."
    evidence: dict[str, Any] = field(default_factory=dict)
    "The numbers that show it."
    cure: str = ""
    "What to do; by default what FINDINGS says."
    level: str = ""
    "By default the level that FINDINGS gives."

    def __post_init__(self) -> None:
        level, cure = FINDINGS.get(self.name, ("warning", ""))
        object.__setattr__(self, "level", self.level or level)
        object.__setattr__(self, "cure", self.cure or cure)
        if self.level not in LEVELS:
            raise ForgeError(f"Finding {self.name!r}: level={self.level!r}: choose from {', '.join(LEVELS)}.")


FINDINGS = {
    # the graph of the first losses
    "refused": ("error", "Change what the message names: a fit stops there too."),
    "unregistered_parameters": ("error", "Assign layers to attributes in __init__; several to an nn.ModuleList."),
    "unused_parameters": ("warning", "Use the module in the loss, delete it, or freeze it: requires_grad_(False)."),
    "unused_module": ("note", "Delete the module, or freeze it, if it is not meant to train."),
    "no_gradient": ("warning", "Remove no_grad(), .detach() or .item() on the way to the loss, or freeze the weights."),
    "not_in_optimizer": ("warning", "Give the parameters to the optimizer, or freeze them: requires_grad_(False)."),
    "target_has_gradient": ("warning", "Detach the target: the loss trains whatever made it, too."),
    "backward_in_step": ("error", "Return the loss and remove .backward(): the Trainer runs it."),
    "mode_changed": ("warning", "Remove .train() and .eval() from the step: the Trainer sets the mode."),
    "batch_changed": ("warning", "Copy before changing in place: x = x + noise instead of x += noise."),
    "validated_in_train_mode": ("warning", "Remove .train() from validation, or an overridden eval()."),
    "hidden_from_autograd": ("warning", "Compute without .data: autograd does not see what happens to it."),
    "repeated_module": ("warning", "Make a module for each layer: [Block() for _ in range(n)], not [Block()] * n."),
    "attribute_name": ("warning", "Write p.requires_grad = False, or p.requires_grad_(False)."),
    "shared_storage": ("warning", "Tie the parameter itself: self.out.weight = self.embed.weight."),
    # losses and their inputs
    "activation_before_loss": ("error", "Pass raw logits: the loss applies its own softmax or sigmoid."),
    "relu_before_loss": ("warning", "Remove the ReLU after the last layer: logits may be negative."),
    "output_range": ("error", "Remove the last activation, or scale the targets into its range."),
    "wrong_dimension": ("warning", "Name the dimension of classes: dim=1, or dim=-1."),
    "class_ids_in_regression": ("warning", "Use cross_entropy with one output per class."),
    "sum_reduction": ("note", "Use reduction='mean', or divide by the number of samples."),
    "mixed_reductions": ("warning", "Reduce all terms of the loss in one way: all means, or all sums per sample."),
    "broadcast_loss": ("error", "Give predictions and targets one shape: prediction.squeeze(1), or y.unsqueeze(1)."),
    "padding_in_loss": ("warning", "Pass ignore_index, or mask the padded positions out of the mean."),
    "weights_reversed": ("warning", "Weigh rare classes more: total / (classes * counts), negatives / positives."),
    "metric_wrong": ("warning", "Compute it on a prediction that is known to be right, and correct it until it is 1."),
    "label_smoothing": ("warning", "Smooth by 0.05 to 0.2: it is what the right class loses, not what it keeps."),
    "competing_labels": ("warning", "Use a sigmoid per label: binary_cross_entropy_with_logits on the raw scores."),
    "dropout_on_output": ("warning", "Remove the dropout after the last layer."),
    # experiments
    "skips_a_step": ("note", "Shift targets once: where the data or the loss does it, the step must not."),
    "gradient_is_cut": (
        "note",
        "Look at detach(), no_grad(), .item() and autograd.grad() without create_graph; check a backward by gradcheck.",
    ),
    "tensor_ignored": (
        "note",
        "Use it in the step: a mask, a weight or a flag such as done changes the loss. Or leave it out of the batch.",
    ),
    "part_ignored": ("note", "Follow these columns or steps through the model: they are cut off or overwritten."),
    "state_between_batches": (
        "note",
        "Reset it where its step or its evaluation begins, if it is not meant.",
    ),
    "loss_floor": (
        "warning",
        "Give the loss raw answers: remove the last activation, divide by a temperature, or scale answers and targets.",
    ),
    "metric_blind": ("note", "Look at the arguments, the dimension and the threshold of the metric."),
    "bad_values": ("warning", "Remove or fill in what is missing where the data are read."),
    "values_unseen": ("warning", "Encode all splits by one table, and split so that each class is in train."),
    "pairs_broken": ("error", "Draw once, and apply the same turn to the input and to its target."),
    "depends_on_company": ("warning", "Mask padding, offset indices by sample, keep batch statistics out."),
    "pixels_scrambled": ("warning", "Move the channels by permute(2, 0, 1); view and reshape do not move them."),
    "weights_stand_still": ("warning", "Give the optimizer the weights that the model uses, at a rate above 0."),
    "average_too_close": ("warning", "Keep most of the average: average = 0.99 * average + 0.01 * weight."),
    "average_stands_still": ("note", "Update the copy after each step, if it is meant to follow."),
    "random_validation_data": ("note", "Leave augmentation out of val, or draw it from a generator with a fixed seed."),
    # independence
    "batch_dependence": (
        "error",
        "Keep samples apart: look for a view across the batch, or a mean over it.",
    ),
    "sees_the_future": ("error", "Mask the attention: position t may see positions up to t, not its own target."),
    "positions_ignored": ("warning", "Follow the positions through the model: some of them never reach the output."),
    "random_evaluation": (
        "warning",
        "Use F.dropout(x, p, self.training); draw noise in training alone, or from a generator with a fixed seed.",
    ),
    "input_ignored": ("error", "Follow the input through forward: it is overwritten, or multiplied by zero."),
    "wrong_mode": ("warning", "Set mode=min for losses and errors, and mode=max for accuracies and scores."),
    "metric_by_batch": (
        "note",
        "Sum over all batches and divide once: num_items weighs batches, evaluation_end sums. What compares samples "
        "of a batch with each other depends on its size.",
    ),
    # data
    "leakage": ("warning", "Split before anything else, by groups where samples belong together."),
    "val_is_train": ("error", "Validate on samples that are not trained on."),
    "duplicates": ("note", "Look at __getitem__ and the sampler: one sample is served many times."),
    "constant_input": ("error", "Look at how inputs are read: all of them are one value."),
    "unscaled_inputs": ("warning", "Standardise inputs: (x - mean) / std; bytes / 255."),
    "feature_scales": ("warning", "Standardise each column by its own mean and deviation."),
    "split_statistics": ("warning", "Prepare train and val in one way, by the statistics of train."),
    "splits_disagree": ("warning", "Encode labels, words and columns once, for all splits, and look at their labels."),
    "repeated_noise": ("warning", "Draw new noise for each sample: make the generator once, not in __getitem__."),
    "dataset_changed": ("error", "Copy before changing in place in __getitem__: x = x - mean instead of x -= mean."),
    "augmentation_changes_label": ("warning", "Leave the turn out, or change the label with the picture."),
    "target_scale": ("warning", "Standardise the targets, and undo it in predict_step."),
    "not_shuffled": ("warning", "Pass shuffle=True to the loader of train."),
    "dropped_data": ("warning", "Remove drop_last=True, or take a smaller batch."),
    "imbalance": ("warning", "Weigh the classes, sample them evenly, and watch a metric by class."),
    "missing_class": ("warning", "Number labels from 0, without gaps, and give the last layer as many outputs."),
    "reseeded": (
        "warning",
        "Seed once, before training (the Trainer does, by its option seed), and make a generator once, not in a step.",
    ),
    "unseeded": ("warning", "Seed the generator, or draw from torch's global one, which the Trainer seeds."),
    # start and motion
    "initial_loss": ("warning", "Look at the initialisation and the scale of the last layer."),
    "equal_rows": ("warning", "Initialise with random numbers: equal rows get equal gradients for ever."),
    "dead_units": ("warning", "Look at biases and learning rate; units that are never active do not train."),
    "saturated": ("warning", "Scale weights and inputs down: a saturated unit passes no gradient."),
    "vanishing_gradient": ("warning", "Use ReLU or GELU, normalisation, skip connections, or another initialisation."),
    "exploding_gradient": ("warning", "Use normalisation, or a smaller gain in the initialisation."),
    "schedule_zero": ("warning", "Look at integer division and at the start factor: nothing trains at a rate of 0."),
    "schedule_spent": ("warning", "Step it per epoch, (optimizer, schedule, '1 epoch'), or plan it over all updates."),
    "schedule_rises": ("warning", "Set T_max to the number of times that it is stepped: self.trainer.planned_updates."),
    "schedule_dropped": ("warning", "Return (optimizer, schedule) from configure_optimizers."),
    "schedule_still": ("warning", "Plan it over this run's length, or leave it out."),
    "learning_rate_high": ("warning", "Take a smaller rate: `forge tune lr` measures one."),
    "learning_rate_low": ("warning", "Take a larger rate: `forge tune lr` measures one."),
    "optimizer_options": ("warning", "Use the optimizer's defaults for these options, unless you mean it."),
    "batch_norm_momentum": (
        "warning",
        "Use the default of 0.1, the share of a batch that enters the statistics.",
    ),
    "dropout_rate": ("warning", "Drop 0.1 to 0.5 of the units."),
    "diverges": ("warning", "Take a smaller learning rate; look at the loss and the initialisation."),
    "clips_always": ("warning", "Raise max_norm: the clip decides the size of each update, not the learning rate."),
    "clips_never": ("note", "Lower max_norm to a few times the usual norm, or leave clip out: it does nothing here."),
    # learning, and long runs
    "labels_no_easier": ("note", "Look at samples beside their labels: they may be shuffled apart, or a row apart."),
    "memory_grows": ("warning", "Keep loss.detach() or loss.item(), and empty lists that outlive an update."),
    "state_not_saved": ("note", "Make it a buffer, or save it in get_extra_state and set_extra_state."),
    "method_name": ("warning", "Rename the method: forge never calls it by this name."),
    "never_validates": ("warning", "Validate more often, or train for longer: validate_every='1 epoch'."),
    "no_validation": ("note", "Pass a loader of held-out samples as val."),
}
"""Every finding by name: its level, and what to do."""
