{{- define "quire.workerEnv" -}}
{{ include "quire.modelEnv" (list . "worker") }}
- {name: QUIRE_WORKER_DRAIN_GRACE_S, value: "{{ .Values.worker.drainSeconds }}"}
- {name: QUIRE_WORKER_HEALTH_LISTEN, value: "0.0.0.0:50060"}
{{- /* A container sees all cores of its node. */}}
- name: QUIRE_WORKER_THREADS
  valueFrom: {resourceFieldRef: {containerName: worker, resource: requests.cpu}}
{{- if .Values.worker.gpu }}
- {name: QUIRE_WORKER_DEVICE, value: cuda}
{{- end }}
{{- if .Values.tls.enabled }}
- {name: QUIRE_WORKER_TLS_CERT, value: /run/secrets/tls/tls.crt}
- {name: QUIRE_WORKER_TLS_KEY, value: /run/secrets/tls/tls.key}
- {name: QUIRE_WORKER_TLS_CLIENT_CA, value: /run/secrets/tls/ca.crt}
{{- end }}
{{- end }}

{{- /* A worker's pod. Arguments: root; "alone", or with several ranks "leader" or "follower". */ -}}
{{- define "quire.workerPod" -}}
{{- $role := index . 1 -}}
{{- with index . 0 -}}
{{- $values := .Values.worker -}}
{{ include "quire.pod" (list . 10001 "") }}
{{- with include "quire.nodes" $values }}
{{ . }}
{{- end }}
{{- with $values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
terminationGracePeriodSeconds: {{ add $values.drainSeconds 10 }}
{{- if eq $role "alone" }}
topologySpreadConstraints:
  {{- include "quire.spread" (list . "worker" "kubernetes.io/hostname" "ScheduleAnyway") | nindent 2 }}
{{- end }}
containers:
  - name: worker
    {{- include "quire.image" (list . $values.image) | nindent 4 }}
    {{- if ne $role "alone" }}
    command: [sh, -ceu]
    args:
      - |
        export RANK="$LWS_WORKER_INDEX" WORLD_SIZE="$LWS_GROUP_SIZE"
        export MASTER_ADDR="$LWS_LEADER_ADDRESS" MASTER_PORT=29500
        export LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 GLOO_SOCKET_IFNAME=eth0
        exec python -m worker_svc --tensor-parallel-size="$LWS_GROUP_SIZE"
    {{- end }}
    env:
      {{- include "quire.env" (list . "quire.workerEnv" $values.env) | nindent 6 }}
    ports:
      - {name: grpc, containerPort: 50053}
      - {name: health, containerPort: 50060}
      {{- if ne $role "alone" }}
      - {name: ranks, containerPort: 29500}
      {{- end }}
    {{- if eq $role "alone" }}
    startupProbe:
      grpc: {port: 50060}
      periodSeconds: 2
      timeoutSeconds: 5
      failureThreshold: 150
    {{- include "quire.liveness" . | nindent 4 }}
    {{- end }}
    {{- if ne $role "follower" }}
    readinessProbe:
      grpc: {port: 50060, service: ready}
      periodSeconds: 5
      timeoutSeconds: 5
    {{- end }}
    resources:
      {{- toYaml $values.resources | nindent 6 }}
    {{- include "quire.container" . | nindent 4 }}
    volumeMounts:
      {{- include "quire.modelMounts" . | nindent 6 }}
      - {name: weights, mountPath: /home/quire/.cache/quire/weights}
      {{- if $values.gpu }}
      - {name: compiled, mountPath: /home/quire/.compiled}
      {{- end }}
      {{- with include "quire.tlsMount" . }}
      {{- . | nindent 6 }}
      {{- end }}
volumes:
  {{- include "quire.modelVolumes" . | nindent 2 }}
  - {name: weights, emptyDir: {}}
  {{- if $values.gpu }}
  - {name: compiled, emptyDir: {}}
  {{- end }}
  {{- with include "quire.tlsVolume" (list . "worker") }}
  {{- . | nindent 2 }}
  {{- end }}
{{- end }}
{{- end }}
