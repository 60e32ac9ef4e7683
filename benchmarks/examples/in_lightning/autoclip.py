import lightning as L
import torch


class AutoClip(L.Callback):
    """Clip the gradient to a quantile of its norms so far."""

    def __init__(self, quantile: float = 0.1):
        self.quantile = quantile
        self.norms = {}

    def on_before_optimizer_step(self, trainer, module, optimizer):
        number = str(trainer.optimizers.index(optimizer))  # a module may have several
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        earlier = self.norms.get(number, norm.new_empty(0))
        norms = self.norms[number] = torch.cat([earlier, norm[None]])[-1000:]
        limit = norms.quantile(self.quantile)
        for gradient in gradients:
            gradient.mul_((limit / (norm + 1e-6)).clamp(max=1.0))
        module.log("train/clipped_to", limit)

    def state_dict(self):
        return {"norms": self.norms}

    def load_state_dict(self, state):
        self.norms = dict(state["norms"])
