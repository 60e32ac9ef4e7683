"""Graph networks: those of torch_geometric, and message passing by hand."""

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader

import forge
from benchmarks.doctor.zoo.common import accuracy, adamw, generator, mlp, registry, tensor_loaders
from forge.data import Splits

MODELS, entry = registry()


def communities(nodes: int = 120, groups: int = 3, seed: int = 0) -> Data:
    """A stochastic block model with noisy features; a third of the nodes is for training, a third for validation."""
    g = generator(seed)
    labels = torch.randint(groups, (nodes,), generator=g)
    chance = torch.where(labels[:, None] == labels[None], 0.2, 0.015)
    upper = torch.triu(torch.rand(nodes, nodes, generator=g) < chance, 1)
    edges = upper.nonzero().T
    features = 0.7 * F.one_hot(labels, 8).float() + torch.randn(nodes, 8, generator=g)
    part = torch.rand(nodes, generator=g)
    return Data(
        x=features / features.std(),
        y=labels,
        edge_index=torch.cat([edges, edges.flip(0)], 1),
        train_mask=part < 0.4,
        val_mask=part > 0.6,
    )


class Nodes(forge.TaskModule):
    """One graph is the whole batch; the loss counts the nodes of the training mask."""

    def __init__(self, first: nn.Module, second: nn.Module, lr: float = 1e-2):
        super().__init__()
        self.lr = lr
        self.first, self.second = first, second

    def forward(self, graph: Data) -> Tensor:
        hidden = F.dropout(F.elu(self.first(graph.x, graph.edge_index)), 0.3, self.training)
        return self.second(hidden, graph.edge_index)

    def training_step(self, graph):
        logits = self(graph)[graph.train_mask]
        labels = graph.y[graph.train_mask]
        return {"loss": F.cross_entropy(logits, labels), "accuracy": accuracy(logits, labels)}

    def validation_step(self, graph):
        logits = self(graph)[graph.val_mask]
        labels = graph.y[graph.val_mask]
        return {"loss": F.cross_entropy(logits, labels), "accuracy": accuracy(logits, labels)}

    def num_items(self, graph):
        return int(graph.train_mask.sum())

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr, 5e-4)


def whole() -> Splits:
    graph = communities()
    return Splits(train=[graph], val=[graph])


@entry
def gcn_transductive():
    return Nodes(pyg.GCNConv(8, 16), pyg.GCNConv(16, 3)), whole()


@entry
def gat():
    return Nodes(pyg.GATConv(8, 8, heads=2), pyg.GATConv(16, 3)), whole()


@entry
def graph_sage():
    return Nodes(pyg.SAGEConv(8, 16), pyg.SAGEConv(16, 3)), whole()


@entry
def cheb_conv():
    return Nodes(pyg.ChebConv(8, 16, K=2), pyg.ChebConv(16, 3, K=2)), whole()


def small_graphs(count: int = 240) -> list[Data]:
    """Is it a ring or a tree? Features are the degree and noise."""
    g = generator(1)
    graphs = []
    for i in range(count):
        nodes = int(torch.randint(6, 12, (1,), generator=g))
        if i % 2:
            pairs = [(n, (n + 1) % nodes) for n in range(nodes)]
        else:
            pairs = [(n, int(torch.randint(n, (1,), generator=g))) for n in range(1, nodes)]
        edges = torch.tensor(pairs).T
        edges = torch.cat([edges, edges.flip(0)], 1)
        degree = torch.bincount(edges[0], minlength=nodes).float()
        features = torch.stack([degree - 2, torch.randn(nodes, generator=g)], 1)
        graphs.append(Data(x=features, edge_index=edges, y=torch.tensor([i % 2])))
    order = torch.randperm(count, generator=g)
    return [graphs[i] for i in order]


class Graphs(forge.TaskModule):
    """GIN: sums of neighbours, an MLP with BatchNorm over all nodes of the batch, and a sum over each graph."""

    def __init__(self, lr: float = 5e-3):
        super().__init__()
        self.lr = lr
        self.layers = nn.ModuleList(
            pyg.GINConv(nn.Sequential(nn.Linear(w, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU()))
            for w in (2, 16)
        )
        self.head = nn.Linear(16, 2)

    def forward(self, graph: Data) -> Tensor:
        states = graph.x
        for layer in self.layers:
            states = layer(states, graph.edge_index)
        return self.head(pyg.global_mean_pool(states, graph.batch))

    def training_step(self, graph):
        logits = self(graph)
        return {"loss": F.cross_entropy(logits, graph.y), "accuracy": accuracy(logits, graph.y)}

    validation_step = training_step

    def num_items(self, graph):
        return graph.num_graphs

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


@entry
def gin_graph_level():
    graphs = small_graphs()
    return Graphs(), Splits(
        train=DataLoader(graphs[:-48], batch_size=16, shuffle=True), val=DataLoader(graphs[-48:], batch_size=16)
    )


class Links(forge.TaskModule):
    """A graph autoencoder: known edges against sampled pairs; held-out edges in validation."""

    def __init__(self, lr: float = 1e-2):
        super().__init__()
        self.lr = lr
        self.first, self.second = pyg.GCNConv(8, 16), pyg.GCNConv(16, 8)

    def forward(self, graph: Data) -> Tensor:
        return self.second(F.relu(self.first(graph.x, graph.edge_index)), graph.edge_index)

    def loss(self, graph: Data, known: Tensor, g: torch.Generator | None) -> Tensor:
        states = self(graph)
        others = torch.randint(len(graph.x), known.shape, generator=g)
        good = (states[known[0]] * states[known[1]]).sum(1)
        bad = (states[others[0]] * states[others[1]]).sum(1)
        return F.softplus(-good).mean() + F.softplus(bad).mean()

    def training_step(self, graph):
        return self.loss(graph, graph.edge_index, None)

    def validation_step(self, graph):
        return self.loss(graph, graph.held_out, generator(3))

    def num_items(self, graph):
        return graph.edge_index.size(1)

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


@entry
def link_prediction():
    graph = communities(seed=2)
    one_way = graph.edge_index[:, graph.edge_index[0] < graph.edge_index[1]]
    held = torch.rand(one_way.size(1), generator=generator(4)) < 0.15
    known = one_way[:, ~held]
    graph.edge_index, graph.held_out = torch.cat([known, known.flip(0)], 1), one_way[:, held]
    return Links(), Splits(train=[graph], val=[graph])


class Messages(forge.TaskModule):
    """Interaction network by hand on dense graphs: predict the pull between particles."""

    def __init__(self, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.edge = mlp(2 * 3, 48, 32, activation=nn.SiLU)
        self.node = mlp(3 + 32, 48, 2, activation=nn.SiLU)

    def forward(self, particles: Tensor) -> Tensor:
        count = particles.size(1)
        one = particles[:, :, None].expand(-1, -1, count, -1)
        two = particles[:, None].expand(-1, count, -1, -1)
        messages = self.edge(torch.cat([one, two], -1))
        others = 1 - torch.eye(count)
        gathered = (messages * others[..., None]).sum(2) / (count - 1)
        return self.node(torch.cat([particles, gathered], -1))

    def training_step(self, batch):
        particles, forces = batch
        return F.mse_loss(self(particles), forces)

    validation_step = training_step

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


@entry
def interaction_network():
    g = generator(5)
    places = torch.randn(320, 5, 2, generator=g)
    mass = 0.5 + torch.rand(320, 5, generator=g)
    gap = places[:, None] - places[:, :, None]
    pull = mass[:, None] / (gap.square().sum(-1) + 1)
    forces = (pull[..., None] * gap).sum(2)
    return Messages(), tensor_loaders(torch.cat([places, mass[..., None]], -1), forces / forces.std())


class Equivariant(nn.Module):
    """A layer of EGNN: positions move along their differences."""

    def __init__(self, width: int):
        super().__init__()
        self.edge = mlp(2 * width + 1, 32, width, activation=nn.SiLU)
        self.pull = mlp(width, 16, 1, activation=nn.SiLU)
        self.node = mlp(2 * width, 32, width, activation=nn.SiLU)

    def forward(self, states: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        count = states.size(1)
        gap = places[:, :, None] - places[:, None]
        pair = torch.cat(
            [
                states[:, :, None].expand(-1, -1, count, -1),
                states[:, None].expand(-1, count, -1, -1),
                gap.square().sum(-1, keepdim=True),
            ],
            -1,
        )
        messages = self.edge(pair)
        places = places + (gap * self.pull(messages)).mean(2)
        return states + self.node(torch.cat([states, messages.mean(2)], -1)), places


class Moved(forge.TaskModule):
    """Where will the particles be? The last layer's states have no influence on the positions, so only some count."""

    def __init__(self, lr: float = 3e-3):
        super().__init__()
        self.lr = lr
        self.embed = nn.Linear(1, 16)
        self.layers = nn.ModuleList(Equivariant(16) for _ in range(2))

    def forward(self, charge: Tensor, places: Tensor) -> Tensor:
        states = self.embed(charge)
        for layer in self.layers:
            states, places = layer(states, places)
        return places

    def training_step(self, batch):
        charge, places, later = batch
        return F.mse_loss(self(charge, places), later)

    validation_step = training_step

    def configure_optimizers(self):
        return adamw(self.parameters(), self.lr)


@entry
def egnn_last_node_update_unused():
    """As published, the last layer also updates the node states, which nothing reads."""
    g = generator(6)
    places = torch.randn(320, 5, 3, generator=g)
    charge = (torch.randint(2, (320, 5, 1), generator=g) * 2 - 1).float()
    gap = places[:, :, None] - places[:, None]
    push = (charge[:, :, None] * charge[:, None] * gap / (gap.square().sum(-1, keepdim=True) + 0.5)).sum(2)
    return Moved(), tensor_loaders(charge, places, places + 0.5 * push)
