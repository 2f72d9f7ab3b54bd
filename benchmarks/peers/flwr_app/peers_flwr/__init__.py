"""The peers' task as a Flower app: a worker is a SuperNode, the server a SuperLink with FedAvgM."""
