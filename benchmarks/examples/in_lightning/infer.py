import torch
from digits_module import Digits

model = Digits.load_from_checkpoint("runs/digits/last.ckpt", map_location="cpu").eval()
with torch.inference_mode():
    digits = model(torch.rand(5, 8, 8)).argmax(1)
print(digits)
