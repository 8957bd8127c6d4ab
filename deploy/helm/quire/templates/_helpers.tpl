{{- /* Services have no dots in their names. Of a StatefulSet, which a LeaderWorkerSet also creates for
       each worker, the name and a hash of 11 characters are a label, which has at most 63. */ -}}
{{- define "quire.name" -}}
{{ .Release.Name | replace "." "-" | trunc 41 | trimAll "-" }}
{{- end }}

{{- /* Fails for what values.schema.json cannot say. */ -}}
{{- define "quire.check" -}}
{{- if not (regexMatch "^[a-z]" .Release.Name) }}
{{- fail (printf "the release %q has to begin with a letter, because names of Services do" .Release.Name) }}
{{- end }}
{{- range $name := list "gateway" "autoscaling" }}
{{- with index $.Values $name }}
{{- if gt (int .minReplicas) (int .maxReplicas) }}
{{- fail (printf "%s.minReplicas (%v) is above %s.maxReplicas (%v)" $name .minReplicas $name .maxReplicas) }}
{{- end }}
{{- end }}
{{- end }}
{{- with .Values.worker }}
{{- if and (has (toString .maxSurge) (list "0" "0%")) (has (toString .maxUnavailable) (list "0" "0%")) }}
{{- fail "worker.maxSurge and worker.maxUnavailable are both 0, so no worker could be replaced" }}
{{- end }}
{{- end }}
{{- end }}

{{- /* The variables of a container: those of the chart, replaced by the user's of the same name.
       Arguments: root, name of the template with the chart's, the user's. */ -}}
{{- define "quire.env" -}}
{{- $given := list -}}
{{- range index . 2 }}{{ $given = append $given .name }}{{ end -}}
{{- $env := list -}}
{{- range include (index . 1) (index . 0) | fromYamlArray }}
{{- if not (has .name $given) }}{{ $env = append $env . }}{{ end -}}
{{- end }}
{{- concat $env (index . 2) | toYaml }}
{{- end }}

{{- /* Ports of Redis outside of the cluster, as JSON: those in the URL, and that of the servers that
       Sentinels name. */ -}}
{{- define "quire.redisPorts" -}}
{{- $ports := list (int .port) -}}
{{- $default := ternary 26379 6379 (contains "+sentinel" .url) -}}
{{- $hosts := regexReplaceAll "^[^:]+://" .url "" | regexFind "^[^/?]+" | regexFind "[^@]+$" -}}
{{- range splitList "," $hosts }}
{{- $ports = append $ports (regexFind ":[0-9]+$" . | trimPrefix ":" | default $default | int) }}
{{- end }}
{{- uniq $ports | toJson }}
{{- end }}

{{- /* Labels that select the pods of a component. Arguments: root, component. */ -}}
{{- define "quire.selector" -}}
app.kubernetes.io/name: quire
app.kubernetes.io/instance: {{ include "quire.name" (index . 0) }}
{{- with index . 1 }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end }}

{{- /* Labels of an object. Arguments: root, component or "". */ -}}
{{- define "quire.labels" -}}
{{ include "quire.selector" . }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: {{ (index . 0).Chart.Name }}-{{ (index . 0).Chart.Version }}
{{- end }}

{{- /* Arguments: root, name of the image. */ -}}
{{- define "quire.image" -}}
{{- with index . 0 -}}
image: {{ .Values.image.registry }}{{ index $ 1 }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- with .Values.image.pullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
{{- end }}
{{- end }}

{{- /* What every pod has. Arguments: root, user; name of a ServiceAccount with a token, or "". */ -}}
{{- define "quire.pod" -}}
automountServiceAccountToken: {{ ne (index . 2) "" }}
{{- with index . 2 }}
serviceAccountName: {{ . }}
{{- end }}
enableServiceLinks: false
{{- with (index . 0).Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ index . 1 }}
  runAsGroup: {{ index . 1 }}
  fsGroup: {{ index . 1 }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- /* Where a pod runs. Argument: the component's values. */ -}}
{{- define "quire.nodes" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "quire.container" -}}
securityContext:
  readOnlyRootFilesystem: true
  allowPrivilegeEscalation: false
  capabilities: {drop: [ALL]}
{{- end }}

{{- /* Arguments: root, component, key of the topology, what if it cannot be met. */ -}}
{{- define "quire.spread" -}}
- maxSkew: 1
  topologyKey: {{ index . 2 }}
  whenUnsatisfiable: {{ index . 3 }}
  matchLabelKeys: [pod-template-hash]
  labelSelector:
    matchLabels:
      {{- include "quire.selector" (list (index . 0) (index . 1)) | nindent 6 }}
{{- end }}

{{- /* The process is alive. */ -}}
{{- define "quire.liveness" -}}
livenessProbe:
  grpc: {port: 50060}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end }}

{{- /* Arguments: root, component. */ -}}
{{- define "quire.modelEnv" -}}
{{- $prefix := printf "QUIRE_%s" (upper (index . 1)) -}}
{{- with (index . 0).Values.model -}}
- name: {{ $prefix }}_MODEL
  value: {{ .hub | default .path | quote }}
{{- if .hub }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .hubSecret | quote }}, key: token, optional: true}}
{{- end }}
{{- end }}
{{- end }}

{{- define "quire.modelMounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: hub, mountPath: /home/quire/.cache/huggingface}
{{- if not .Values.model.hub }}
- {name: model, mountPath: {{ .Values.model.path | quote }}, readOnly: true}
{{- end }}
{{- end }}

{{- define "quire.modelVolumes" -}}
- {name: tmp, emptyDir: {}}
- {name: hub, emptyDir: {}}
{{- if not .Values.model.hub }}
- {name: model, persistentVolumeClaim: {claimName: {{ .Values.model.claim | quote }}, readOnly: true}}
{{- end }}
{{- end }}

{{- /* Arguments: root, component. */ -}}
{{- define "quire.tlsVolume" -}}
{{- if (index . 0).Values.tls.enabled -}}
- name: tls
  secret: {secretName: {{ include "quire.name" (index . 0) }}-{{ index . 1 }}-tls, defaultMode: 0440}
{{- end }}
{{- end }}

{{- define "quire.tlsMount" -}}
{{- if .Values.tls.enabled -}}
- {name: tls, mountPath: /run/secrets/tls, readOnly: true}
{{- end }}
{{- end }}

{{- /* Arguments: root, component. */ -}}
{{- define "quire.budget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "quire.name" (index . 0) }}-{{ index . 1 }}
  labels:
    {{- include "quire.labels" . | nindent 4 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels:
      {{- include "quire.selector" . | nindent 6 }}
{{- end }}

{{- /* A headless Service. Arguments: root, component, port. */ -}}
{{- define "quire.headless" -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ include "quire.name" (index . 0) }}-{{ index . 1 }}
  labels:
    {{- include "quire.labels" . | nindent 4 }}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    {{- include "quire.selector" . | nindent 4 }}
    {{- if and (eq (index . 1) "worker") (gt (int (index . 0).Values.worker.ranks) 1) }}
    quire-rank: "0"
    {{- end }}
  ports:
    - name: grpc
      port: {{ index . 2 }}
      targetPort: grpc
      appProtocol: {{ ternary "https" "kubernetes.io/h2c" (index . 0).Values.tls.enabled }}
{{- end }}

{{- /* A rule of a NetworkPolicy. Arguments: root, "from" or "to", component, port or 0 for all. */ -}}
{{- define "quire.peer" -}}
- {{ index . 1 }}:
    - podSelector:
        matchLabels:
          {{- include "quire.selector" (list (index . 0) (index . 2)) | nindent 10 }}
  {{- with index . 3 }}
  ports:
    - {protocol: TCP, port: {{ . }}}
  {{- end }}
{{- end }}
